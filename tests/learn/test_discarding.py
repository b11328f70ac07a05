"""An update that is thrown away leaves nothing behind: no gradient for the next one, and the average where it was."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_learner import BASE, KNOBS, G, batch, distance, weights

from fastsched.config import Config, ModelConfig, RolloutConfig
from fastsched.engines.learner.deepspeed_engine import DeepSpeedLearner
from fastsched.engines.models.loading import load_policy
from fastsched.learn.learner import Learner


def spoiled_loss(learner: Learner, spoil):
    """`engine.backward` with `spoil` over the loss of every micro-batch; returns the engine's own."""
    backward = learner.engine.backward

    def spoiled(micro, loss, *, reference):
        def bad(policy, other):
            out = loss(policy, other)
            return out._replace(loss=spoil(out.loss))
        return backward(micro, bad, reference=reference)

    learner.engine.backward = spoiled
    return backward


def run(model_path, tmp_path, stage, dtype, steps, bad=(), spoil=None):
    """(weights, average, statistics of the last step) after `steps`, of which those in `bad` have their loss spoiled."""
    model = ModelConfig(dtype=dtype)
    cfg = replace(BASE, zero_stage=stage, micro_batch_tokens=64)
    config = Config(model=model, learner=cfg, rollout=RolloutConfig(responses=G, max_new_tokens=8))
    learner = Learner(DeepSpeedLearner(load_policy(model_path, model), cfg, model), config, tmp_path)
    for step in steps:
        backward = spoiled_loss(learner, spoil) if step in bad else learner.engine.backward
        before = dict(learner.engine.average_weights()) if step in bad else {}
        before = {name: w.clone() for name, w in before.items()}
        stats = learner.update(*batch(step), KNOBS, step)
        learner.engine.backward = backward
        assert stats.skipped == (step in bad)
        assert not before or distance(before, dict(learner.engine.average_weights())) == 0
    found = weights(learner), {name: w.clone() for name, w in learner.engine.average_weights()}, stats
    learner.engine.close()
    return found


@functools.cache
def healthy(model_path, stage, dtype):
    return run(model_path, Path(model_path), stage, dtype, (2, 4))


@pytest.mark.parametrize("stage, dtype", [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"),
                                          (1, "bfloat16"), (2, "bfloat16")])
@pytest.mark.parametrize("spoil", [lambda loss: loss * np.nan, lambda loss: loss + np.inf], ids=["nan", "infinite, finite gradients"])
def test_a_skipped_update_is_as_if_it_had_never_been(model_path, tmp_path, stage, dtype, spoil):
    plain = healthy(model_path, stage, dtype)
    spoiled = run(model_path, tmp_path, stage, dtype, (1, 2, 3, 4), (1, 3), spoil)
    assert distance(plain[0], spoiled[0]) == 0 and distance(plain[1], spoiled[1]) == 0
    assert repr(plain[2]) == repr(spoiled[2])
