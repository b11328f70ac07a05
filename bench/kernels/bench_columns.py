"""The column filter on SmolLM2's own states: `pytest bench/kernels/bench_columns.py -s`, `TOKENS=2048` sampled tokens.

For each eps: share of columns kept in a chunk, time against the unfiltered head and its three GEMMs (bf16, chunks of
512 rows), error of dX and dW against fp64, beside the unfiltered bf16 error.
"""

import os
import time

import pytest
import torch
from fastsched_kernels.columns import active_columns
from fastsched_kernels.linear import policy_loss
from fastsched_kernels.reference import Objective
from fastsched_kernels.rows_pytorch import policy_rows_
from fastsched_kernels.testing import relative_error

from fastsched.config import ModelConfig
from fastsched.engines.models.loading import backbone_and_head, load_policy, load_tokenizer, resolve_model

TOKENS, CHUNK = int(os.environ.get("TOKENS", "2048")), 512
PROMPTS = (
    "What is 482 + 77?",
    "Tell me a short story about a lighthouse.",
    "Why is the sky blue?",
    "List five uses of a brick.",
)
EPS = (0.0, 2.0**-15, 2.0**-14, 2.0**-13, 2.0**-12)


@pytest.fixture(scope="module")
def states():
    """(hidden [T, H] of sampled tokens, head weight, the tokens) in fp32."""
    config = ModelConfig(name="builtin:smollm2")
    path = resolve_model(config)
    model, tokenizer = load_policy(path, config).eval(), load_tokenizer(path, config)
    torch.manual_seed(0)
    hidden, target, backbone = [], [], backbone_and_head(model)
    each = -(-TOKENS // len(PROMPTS) // 8)
    for prompt in PROMPTS:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            out = model.generate(**chat, do_sample=True, max_new_tokens=each, min_new_tokens=each, num_return_sequences=8, use_cache=True)
            states = backbone[0](out).last_hidden_state
        start = chat["input_ids"].shape[1]
        hidden.append(states[:, start - 1 : -1].flatten(0, 1))
        target.append(out[:, start:].flatten())
    return torch.cat(hidden)[:TOKENS], backbone[1].detach(), torch.cat(target)[:TOKENS]


def gradients(hidden, weight, target, advantage, eps: float, dtype=torch.bfloat16):
    x, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    start = time.perf_counter()
    out = policy_loss(
        x,
        w,
        target,
        advantage=advantage,
        token_weight=1 / len(target),
        entropy_coef=0.01,
        filter_eps=eps,
        chunk_rows=CHUNK,
    )
    out.loss.backward()
    return time.perf_counter() - start, out, x.grad, w.grad


def columns_kept(hidden, weight, target, advantage, eps: float) -> float:
    x, y, a = hidden[:CHUNK].bfloat16(), target[:CHUNK], advantage[:CHUNK]
    z = x @ weight.bfloat16().t()
    out = policy_rows_(z, y, None, Objective(a, 1 / len(target), entropy_coef=0.01), 1.0, None, None, True)
    return float(active_columns(z, eps * out.size)[0].float().mean())


@pytest.fixture(scope="module")
def truth(states):
    """(advantage, dX, dW), the gradients in fp64."""
    advantage = torch.randn(len(states[2]), generator=torch.Generator().manual_seed(1))
    return advantage, *gradients(*states, advantage, 0.0, torch.float64)[2:]


@pytest.mark.parametrize("eps", EPS)
def bench_columns(benchmark, states, truth, eps):
    hidden, weight, target = states
    advantage, true_x, true_w = truth
    plain = min(gradients(hidden, weight, target, advantage, 0.0)[0] for _ in range(2))
    seconds, out, dx, dw = min((gradients(hidden, weight, target, advantage, eps) for _ in range(3)), key=lambda r: r[0])
    benchmark.pedantic(gradients, args=(hidden, weight, target, advantage, eps), rounds=1)
    info = dict(
        eps=eps,
        entropy=round(float(out.entropy.mean()), 2),
        kept=round(columns_kept(hidden, weight, target, advantage, eps), 3),
        dropped=float(out.dropped),
        time=round(seconds / plain, 2),
        dx=relative_error(dx, true_x),
        dw=relative_error(dw, true_w),
    )
    benchmark.extra_info.update(info)
    print("\n" + "  ".join(f"{k} {v:.4g}" for k, v in info.items()))
