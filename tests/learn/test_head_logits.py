"""`learner.logits` in the loss: fp32 logits of a bf16 head leave nothing of their rounding, rounded ones have the target's in fp32."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from plain import BASE, KNOBS, ROLLOUT

from fastsched.learn.objective import SUMS, StepObjective, Tokens
from fastsched.types import Head

N, V = 64, 400


@pytest.fixture(scope="module")
def head():
    """(head in bf16 with large logits, target, fp64 log-probability)."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = 4 * torch.randn(N, 48, generator=g), torch.randn(V, 48, generator=g)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    z = hidden.double() @ weight.double().t()
    target = z.argmax(1)
    logp = z.log_softmax(1).gather(1, target[:, None]).squeeze(1)
    return Head(hidden.requires_grad_(), weight.requires_grad_(), None, None), target, logp


def tokens(target: torch.Tensor, truth: torch.Tensor) -> Tokens:
    one = torch.ones(N)
    return Tokens(target, one, one / N, truth.float(), None, torch.arange(N) // 8, torch.zeros(N, dtype=torch.long), None)


@pytest.mark.parametrize("logits, below", [("fp32", 1e-4), ("bf16", 0.2)])
@pytest.mark.parametrize("loss", ["dapo", "gspo"])
def test_the_loss_and_its_scores_take_the_dtype(head, logits, below, loss):
    policy, target, truth = head
    objective = StepObjective(replace(BASE, logits=logits, loss=loss, kl="none"), ROLLOUT, KNOBS)
    scores = objective.score(policy, target).logp
    deviation = float(objective(policy, None, tokens(target, truth)).sums[SUMS.index("deviation")]) / N
    assert deviation == pytest.approx(float((scores - truth).abs().mean()), rel=1e-3, abs=1e-6)
    assert deviation < below and (logits == "fp32" or deviation > 1e-3)
    assert np.isfinite(deviation) and (scores <= 0).all()
