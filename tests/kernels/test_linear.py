"""The chunked head against autograd on full logits in fp64, option by option."""

import subprocess
import sys

import pytest
import torch
from fastsched_kernels import reference
from fastsched_kernels.linear import linear_token_loss, linear_token_stats, policy_loss
from fastsched_kernels.reference import Objective
from fastsched_kernels.testing import assert_no_worse, poisoned_empty, seeded
from head_problem import OPTIONS, N, V, ours, per_token, problem, truth
from row_implementations import NAMES, needs_compiled_ops


@pytest.mark.parametrize("name", OPTIONS)
def test_option_matches_autograd_and_changes_the_result(name):
    tensors, numbers, target, old, ref = problem()
    base = {**numbers, "old_logp": old, "ref_logp": ref}
    options = {**base, **OPTIONS[name]}
    loss, out, grads = ours(tensors, target, options, upstream=-1.7, chunk_rows=10)
    true_loss, true_out, true_grads = truth(tensors, target, options, upstream=-1.7)
    torch.testing.assert_close(loss, true_loss, rtol=1e-11, atol=1e-13)
    for k in true_grads:
        torch.testing.assert_close(grads[k], true_grads[k], rtol=1e-9, atol=1e-12)
    for k in ("ratio", "kl", "clipped"):
        torch.testing.assert_close(getattr(out, k), getattr(true_out, k), equal_nan=True)
    if name != "plain":
        plain = ours(tensors, target, base)[2]
        assert not torch.allclose(plain["weight"], grads["weight"] / -1.7, rtol=1e-6), f"{name} is ignored"


RUNS = [
    ("pytorch", torch.bfloat16), ("triton", torch.bfloat16),
    *(pytest.param("cpp", dtype, marks=needs_compiled_ops) for dtype in (torch.float32, torch.bfloat16)),
]


@pytest.mark.parametrize("implementation, dtype", RUNS)
@pytest.mark.parametrize("name", OPTIONS)
def test_no_worse_than_pytorch_in_the_same_dtype(dtype, implementation, name):
    """Every option in every implementation: outputs and gradients, NaN-poisoned buffers, a tail in every vector
    loop.
    """
    tensors, numbers, target, old, ref = problem(dtype)
    options = {**numbers, "old_logp": old, "ref_logp": ref, **OPTIONS[name]}
    true_loss, true_out, true_grads = truth(tensors, target, options)
    eager_loss, eager_out, eager = truth(tensors, target, options, dtype)
    with poisoned_empty():
        loss, out, grads = ours(tensors, target, options, chunk_rows=10, implementation=implementation)
    assert torch.equal(out.clipped, true_out.clipped)
    assert_no_worse(loss, eager_loss.to(dtype), true_loss, "loss")
    assert_no_worse(out.ratio, eager_out.ratio.to(dtype), true_out.ratio, "ratio")
    assert_no_worse(out.kl, eager_out.kl.to(dtype), true_out.kl, "kl")
    for k in true_grads:
        assert grads[k].dtype == dtype
        assert_no_worse(grads[k], eager[k].to(dtype), true_grads[k], k)


def test_rows_without_weight_are_not_touched_and_the_rest_is_unchanged():
    tensors, numbers, target, old, ref = problem()
    keep = torch.rand(N, generator=seeded(3)) < 0.4
    numbers["token_weight"] = torch.where(keep, numbers["token_weight"], 0.0)
    options = {**numbers, "old_logp": old, "ref_logp": ref, "kl": "exact", "kl_coef": 0.3, "entropy_coef": 0.1}
    true_loss, true_out, true_grads = truth(tensors, target, options)
    bad = dict(tensors, hidden=torch.where(keep[:, None], tensors["hidden"], torch.nan))
    bad_options = dict(
        options,
        old_logp=torch.where(keep, old, torch.inf),
        advantage=torch.where(keep, numbers["advantage"], torch.nan),
    )
    loss, out, grads = ours(bad, torch.where(keep, target, -100), bad_options)
    torch.testing.assert_close(loss, true_loss)
    torch.testing.assert_close(grads["weight"], true_grads["weight"])
    assert (grads["hidden"][~keep] == 0).all()
    assert out.logp[~keep].isnan().all() and out.logp[keep].isfinite().all() and not out.clipped[~keep].any()
    torch.testing.assert_close(out.kl[keep], true_out.kl[keep])


def test_flat_rows_leave_only_when_nothing_else_needs_them():
    tensors, numbers, target, old, ref = problem()
    flat = torch.arange(N) % 3 == 0
    numbers["advantage"] = torch.where(flat, 0.0, numbers["advantage"])
    options = {**numbers, "old_logp": old, "ref_logp": ref}
    loss, out, grads = ours(tensors, target, options)
    loss_all, out_all, grads_all = ours(tensors, target, options, skip_flat=False)
    assert out.logp[flat].isnan().all() and out_all.logp.isfinite().all()
    torch.testing.assert_close(loss, loss_all)
    torch.testing.assert_close(grads, grads_all)
    for extra in ({"entropy_coef": 0.1}, {"kl": "k3", "kl_coef": 0.1}, {"distill": 0.1}):
        assert ours(tensors, target, {**options, **extra})[1].logp.isfinite().all()


def test_no_row_kept():
    tensors, numbers, target, old, _ = problem()
    loss, out, grads = ours(tensors, target, {"advantage": 1.0, "token_weight": 0.0, "old_logp": old})
    assert loss == 0 and all((g == 0).all() for g in grads.values()) and out.logp.isnan().all()


def test_extreme_log_ratio_is_finite_and_has_the_clamps_gradient():
    tensors, numbers, target, old, ref = problem()
    for shift in (100.0, -100.0):
        options = {
            **numbers,
            "old_logp": old + shift,
            "ref_logp": ref + shift,
            "kl": "k3",
            "kl_coef": 0.1,
            "clip": None,
        }
        loss, _, grads = ours(tensors, target, options)
        true_loss, _, true_grads = truth(tensors, target, options)
        assert loss.isfinite() and grads["weight"].isfinite().all()
        torch.testing.assert_close(grads["weight"], true_grads["weight"])


def test_chunks_and_order_do_not_matter():
    tensors, numbers, target, old, ref = problem()
    options = {**numbers, "old_logp": old, "kl": "exact", "kl_coef": 0.3}
    loss, out, grads = ours(tensors, target, options, chunk_rows=1000)
    order = torch.randperm(N, generator=seeded(5))
    move = lambda x: x[order] if isinstance(x, torch.Tensor) and x.shape[:1] == (N,) else x
    loss2, out2, grads2 = ours(
        {k: move(x) for k, x in tensors.items()}, move(target), {k: move(x) for k, x in options.items()}, chunk_rows=1
    )
    torch.testing.assert_close(loss, loss2)
    torch.testing.assert_close(out.entropy[order], out2.entropy)
    torch.testing.assert_close(grads["hidden"][order], grads2["hidden"])
    torch.testing.assert_close(grads["weight"], grads2["weight"])


def test_tied_embedding_receives_both_gradients():
    tensors, numbers, target, old, _ = problem()
    tied = torch.nn.Parameter(tensors["weight"].clone())
    for loss_of in (
        lambda h: policy_loss(h, tied, target, **numbers, old_logp=old).loss,
        lambda h: reference.policy_loss(h @ tied.t(), target, Objective(**numbers, old_logp=old, clip_low=0.2, clip_high=0.2)).loss.sum(),
    ):
        loss_of(tied[target]).backward()
        tied.grads = [*getattr(tied, "grads", []), tied.grad]
        tied.grad = None
    torch.testing.assert_close(*tied.grads)


def test_one_backward_only_and_none_without_grad():
    tensors, numbers, target, old, _ = problem()
    hidden = tensors["hidden"].requires_grad_()
    out = policy_loss(hidden, tensors["weight"], target, **numbers, old_logp=old)
    out.loss.backward(retain_graph=True)
    assert tensors["weight"].grad is None and not out.logp.requires_grad
    with pytest.raises(RuntimeError, match="compute the loss again"):
        out.loss.backward()
    with torch.no_grad():
        assert not policy_loss(hidden, tensors["weight"], target, **numbers).loss.requires_grad


def test_dtypes_may_differ_and_autocast_changes_nothing():
    tensors, numbers, target, old, _ = problem(torch.float32)
    hidden, weight = tensors["hidden"].bfloat16(), tensors["weight"].clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = policy_loss(hidden, weight, target, **numbers, old_logp=old).loss
    loss.backward()
    plain = policy_loss(hidden, weight.detach().bfloat16(), target, **numbers, old_logp=old).loss
    assert weight.grad.dtype == torch.float32 and torch.equal(loss.detach(), plain)


def test_stats_match_the_reference():
    tensors, _, target, _, _ = problem()
    rest = {k: x for k, x in tensors.items() if k not in ("hidden", "weight")}
    options = {"temperature": 0.5 + per_token, "softcap": 3.0}
    out = linear_token_stats(tensors["hidden"], tensors["weight"], target, **rest, **options, chunk_rows=7)
    logits, ref = (tensors[a] @ tensors[b].t() for a, b in (("hidden", "weight"), ("ref_hidden", "ref_weight")))
    ref = ref + tensors["ref_bias"]
    true = reference.token_stats(logits + tensors["bias"], target, ref_logits=ref, **options)
    for k in ("logp", "entropy", "kl"):
        torch.testing.assert_close(getattr(out, k), getattr(true, k))
    torch.testing.assert_close(out.ref_logp, reference.token_stats(ref, target, **options).logp)
    assert linear_token_stats(tensors["hidden"], tensors["weight"], target).ref_logp.isnan().all()


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"target": torch.full((N,), V)}, IndexError, "outside the vocabulary"),
        ({"target": torch.zeros(N)}, ValueError, "int64"),
        ({"kl": "exact"}, ValueError, "needs ref_hidden"),
        ({"kl": "k3"}, ValueError, "need ref_logp"),
        ({"kl": "k9"}, ValueError, "is none of"),
        ({"chunk_rows": 0}, ValueError, "at least 1"),
        ({"filter_eps": -1e-4}, ValueError, "filter_eps must lie in"),
        ({"filter_eps": 1.0}, ValueError, "filter_eps must lie in"),
        ({"level": "sequence"}, ValueError, "needs the sequence"),
        ({"level": "paragraph"}, ValueError, "none of token, sequence"),
        ({"compute": "later"}, ValueError, "none of auto"),
        ({"implementation": "fortran"}, ValueError, "none of triton, cpp, pytorch"),
        ({"implementation": "cpp"}, NotImplementedError, "no C\\+\\+ kernels for torch.float64 on cpu"),
    ],
)
def test_bad_input_is_named(options, error, words):
    tensors, numbers, target, _, _ = problem()
    with pytest.raises(error, match=words):
        policy_loss(tensors["hidden"], tensors["weight"], **{"target": target, **numbers, **options})


def test_a_users_loss_costs_what_it_says_and_equals_the_built_in_one():
    tensors, numbers, target, old, _ = problem()
    keep = torch.arange(N) % 4 != 0
    rest = {k: tensors[k] for k in ("ref_hidden", "ref_weight", "ref_bias", "bias")}

    def loss(logp, entropy, kl, tokens):
        return tokens["weight"] * (-tokens["advantage"] * (logp - tokens["old"]).exp() + 0.3 * kl - 0.1 * entropy)

    tokens = {"weight": numbers["token_weight"], "advantage": numbers["advantage"], "old": old}
    results = []
    for compute in (
        lambda h, w: linear_token_loss(h, w, target, loss, tokens=tokens, keep=keep, chunk_rows=6, **rest),
        lambda h, w: policy_loss(
            h,
            w,
            target,
            advantage=numbers["advantage"],
            old_logp=old,
            clip=None,
            kl="exact",
            kl_coef=0.3,
            token_weight=torch.where(keep, numbers["token_weight"], 0.0),
            entropy_coef=0.1,
            **rest,
        ),
    ):
        hidden, weight = (tensors[k].clone().requires_grad_() for k in ("hidden", "weight"))
        out = compute(hidden, weight)
        out.loss.backward()
        results.append((out.loss.detach(), out.logp, out.kl, hidden.grad, weight.grad))
    torch.testing.assert_close(*results, equal_nan=True)
    with pytest.raises(ValueError, match="one number for each row"):
        linear_token_loss(tensors["hidden"], tensors["weight"], target, lambda logp, *_: logp.sum())


@pytest.mark.parametrize("implementation", NAMES[:2])
def test_statistics_carry_any_upstream_gradient(implementation):
    """Expanded (sum), non-unit and partly absent upstream gradients of logp, entropy and KL."""
    tensors, _, target, _, _ = problem(torch.float32)
    for read in (
        lambda s: s.logp.sum(),
        lambda s: (s.entropy * per_token).sum(),
        lambda s: (s.kl * s.logp.detach()).sum() + s.kl.mean(),
    ):
        grads = []
        for dtype in (torch.float32, torch.float64):
            leaves = {k: x.detach().to(dtype, copy=True).requires_grad_() for k, x in tensors.items() if not k.startswith("ref")}
            refs = {k: x.to(dtype) for k, x in tensors.items() if k.startswith("ref")}
            if dtype == torch.float32:
                stats = linear_token_stats(**leaves, target=target, **refs, chunk_rows=9, implementation=implementation)
            else:
                logits = leaves["hidden"] @ leaves["weight"].t() + leaves["bias"]
                stats = reference.token_stats(logits, target, ref_logits=refs["ref_hidden"] @ refs["ref_weight"].t() + refs["ref_bias"])
            read(stats).backward()
            grads.append([leaves[k].grad.double() for k in leaves])
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


MEMORY_PROGRAM = """
import re, sys, torch
from fastsched_kernels.linear import policy_loss
weight, rows = torch.randn(8192, 64).requires_grad_(), int(sys.argv[1])
for n in (2048, 12288):
    hidden, target = torch.randn(n, 64).requires_grad_(), torch.zeros(n, dtype=torch.long)
    policy_loss(hidden, weight, target, advantage=torch.ones(n), token_weight=1 / n, chunk_rows=rows).loss.backward()
    print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])  # ru_maxrss would start at the parent's peak
"""


def test_memory_grows_with_the_hidden_size_and_not_with_the_vocabulary():
    """kernels.md 8: hidden states and their gradient, 4H bytes a token each in fp32, and a few numbers; one token's logits are 32 KB."""
    slopes = {}
    for chunk_rows in (256, 12288):
        out = subprocess.run([sys.executable, "-c", MEMORY_PROGRAM, str(chunk_rows)], capture_output=True, text=True, check=True).stdout
        few, many = (int(line) * 1024 for line in out.split())
        slopes[chunk_rows] = (many - few) / (12288 - 2048)
    assert slopes[256] < 2 * (4 * 64 + 28) + 1024 < 16384 < slopes[12288]  # one chunk: the measurement sees logits
