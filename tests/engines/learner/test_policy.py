"""The policy as one module: masks of packed rows."""

import numpy as np
import pytest
import torch

from fastsched.config import ModelConfig
from fastsched.engines.learner.policy import Policy, attention_mask
from fastsched.engines.models.loading import load_policy
from fastsched.types import COMMON, MicroBatch

GROUPS = np.array([[COMMON, COMMON, 0, 0, 0, 0, 0, 1, 1, 1, 1, -1], [COMMON, COMMON, 0, 0, 0, 1, 1, 1, -1, -1, -1, -1]])
RESPONSES = np.array([[0, 0, 0, 1, 1, 2, 2, 0, 0, 1, 2, 0], [0, 0, 0, 1, 2, 0, 1, 1, 0, 0, 0, 0]])
POSITIONS = np.array([[0, 1, 2, 3, 4, 3, 4, 2, 3, 4, 4, 0], [0, 1, 2, 3, 3, 2, 3, 4, 0, 0, 0, 0]])


def packed() -> MicroBatch:
    rows = np.flatnonzero(GROUPS.ravel() >= 0)
    index, number = np.zeros(len(rows), np.int64), np.ones(len(rows), np.float32)
    ids = np.random.default_rng(0).integers(0, 10, GROUPS.shape)
    return MicroBatch(ids, POSITIONS, GROUPS, RESPONSES, rows, index, number, number, number, index, index, index, 2)


def hidden_states(model: str, attention: str, micro: MicroBatch) -> torch.Tensor:
    policy = Policy(load_policy(model, ModelConfig(name=str(model), attention=attention)).eval())
    with torch.no_grad():
        return policy(micro, lambda head: head.hidden)


def test_a_token_sees_its_prompt_its_response_and_the_common_beginning():
    seen = attention_mask(torch.from_numpy(GROUPS), torch.from_numpy(RESPONSES))[0, 0]
    sees = {i: seen[i].nonzero().ravel().tolist() for i in (1, 4, 6, 9, 10)}
    assert sees == {1: [0, 1], 4: [0, 1, 2, 3, 4], 6: [0, 1, 2, 5, 6], 9: [0, 1, 7, 8, 9], 10: [0, 1, 7, 8, 10]}


@pytest.mark.slow
def test_flex_attention_sees_what_the_dense_mask_shows(random_model, monkeypatch):
    """Forward only: FlexAttention has no backward pass on a CPU."""
    monkeypatch.setattr(torch._dynamo.config, "disable", False)  # a vLLM engine in this process turned it off
    dense, flex = (hidden_states(random_model, a, packed()) for a in ("sdpa", "flex_attention"))
    assert dense.std() > 0.1
    torch.testing.assert_close(flex, dense, rtol=1e-4, atol=1e-5)
