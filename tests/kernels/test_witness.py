"""Independent witnesses: Liger's chunked loss, the error of dW against the number of chunks, and mutants that must
be caught.
"""

import pytest
import torch
from fastsched_kernels.linear import policy_loss
from fastsched_kernels.testing import relative_error, seeded
from head_problem import ours, problem, truth


def batch(b=3, t=8, h=16, v=50):
    g = seeded(4)
    hidden, weight = torch.randn(b, t, h, generator=g), torch.randn(v, h, generator=g) * 0.3
    target, mask = torch.randint(v, (b, t), generator=g), torch.rand(b, t, generator=g) < 0.8
    logp = torch.log_softmax(hidden @ weight.t(), -1).gather(-1, target[..., None]).squeeze(-1)
    noise = lambda: logp + 0.3 * torch.randn(b, t, generator=g)
    return hidden, weight, target, mask, torch.randn(b, generator=g), noise(), noise()


def weights(kind, mask, t):
    """Mask over the denominator of each loss type, as a caller bakes it in."""
    lengths = mask.sum(1, keepdim=True).float()
    return {"grpo": mask / lengths / len(mask), "bnpo": mask / mask.sum(), "dr_grpo": mask / (len(mask) * t)}[kind].float()


@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_liger_agrees(kind, beta):
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    hidden, weight, target, mask, advantage, old, ref = batch()
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    module = LigerFusedLinearGRPOLoss(
        beta=beta,
        compiled=False,
        use_ref_model=beta > 0,
        loss_type=kind,
        epsilon_low=0.1,
        epsilon_high=0.3,
        max_completion_length=mask.shape[1],
        temperature=0.9,
    )
    theirs = module(x, w, target, mask.long(), advantage, ref_per_token_logps=ref if beta else None, old_per_token_logps=old)[0]
    theirs.backward()
    y, u = hidden.flatten(0, 1).requires_grad_(), weight.clone().requires_grad_()
    out = policy_loss(
        y,
        u,
        target.flatten(),
        advantage=advantage.repeat_interleave(mask.shape[1]),
        old_logp=old.flatten(),
        ref_logp=ref.flatten(),
        token_weight=weights(kind, mask, mask.shape[1]).flatten(),
        kl="k3" if beta else "none",
        kl_coef=beta,
        clip=(0.1, 0.3),
        temperature=0.9,
    )
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), theirs.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(y.grad, x.grad.flatten(0, 1), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(u.grad, w.grad, rtol=1e-3, atol=1e-5)


def test_weight_gradient_error_does_not_grow_with_the_number_of_chunks():
    tensors, numbers, target, old, ref = problem(torch.bfloat16, n=256)
    options = {**numbers, "old_logp": old}
    true = truth(tensors, target, options)[2]["weight"]
    errors = {rows: relative_error(ours(tensors, target, options, chunk_rows=rows)[2]["weight"], true) for rows in (256, 64, 8, 1)}
    assert max(errors.values()) <= 2 * errors[256], errors


def test_kept_rows_do_not_change_when_others_leave():
    tensors, numbers, target, old, ref = problem(torch.float32, n=64)
    keep = torch.rand(64, generator=seeded(6)) < 0.5
    options = {**numbers, "token_weight": torch.where(keep, numbers["token_weight"], 0.0), "old_logp": old}
    compacted = ours(tensors, target, options)[1]
    everything = ours(tensors, target, {**options, "token_weight": numbers["token_weight"]})[1]
    torch.testing.assert_close(compacted.logp[keep], everything.logp[keep], rtol=0, atol=2e-6)


OPTIONS = dict(kl="exact", kl_coef=0.3, entropy_coef=0.2, clip=(0.05, 0.5), rollout_weight=0.7, temperature=0.7)
MUTANTS = {
    "sign of the entropy bonus": {"entropy_coef": -0.2},
    "temperature left out": {"temperature": 1.0},
    "an estimate in place of the exact KL": {"kl": "k2"},
    "clip bounds exchanged": {"clip": (0.5, 0.05)},
    "rollout weight left out": {"rollout_weight": 1.0},
    "ratio left out": {"old_logp": None},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name):
    """The comparison of test_linear fails for a head with any of these faults: its relative error is far above the tolerance."""
    tensors, numbers, target, old, _ = problem()
    options = {**numbers, **OPTIONS, "old_logp": old}
    true = truth(tensors, target, options)[2]
    for change, caught in (({}, False), (MUTANTS[name], True)):
        grads = ours(tensors, target, {**options, **change})[2]
        assert all((relative_error(grads[k], true[k]) > 1e-2) is caught for k in true), change
