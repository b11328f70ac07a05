import json
import math
from dataclasses import replace

import numpy as np
import pytest
from test_scheduler import outcomes, scheduler, stats

from fastsched.config import Config, ConfigError, KlGateConfig, LearnerConfig, SchedulerConfig
from fastsched.control.kl_gate import BOUND, RATE, follow_quantile


def test_threshold_starts_at_the_first_quantile_and_moves_by_bounded_steps():
    assert follow_quantile(None, 0.3) == 0.3
    assert follow_quantile(0.3, 0.4) == pytest.approx(0.3 + RATE * 0.1)
    assert follow_quantile(0.3, 9.0) == pytest.approx(0.3 + BOUND) and follow_quantile(3.0, 0.0) == pytest.approx(3.0 - BOUND)
    assert follow_quantile(None, math.nan) is None and follow_quantile(0.3, math.inf) == 0.3


def test_threshold_settles_at_the_quantile_of_noisy_batches():
    rng, h0 = np.random.default_rng(0), None
    for _ in range(300):
        h0 = follow_quantile(h0, float(np.quantile(rng.gamma(0.5, 1.0, 500), 0.2)))
    assert h0 == pytest.approx(float(np.quantile(rng.gamma(0.5, 1.0, 200_000), 0.2)), rel=0.15)


def observed(one, quantile):
    selection = one.next_prompts()
    one.observe(outcomes(selection, np.zeros((len(selection.rows), 2))), replace(stats(), entropy_quantile=quantile))


@pytest.mark.parametrize("enabled", [True, False])
def test_the_scheduler_carries_the_threshold_from_step_to_step(enabled):
    one = scheduler(kl_gate=KlGateConfig(enabled=enabled))
    assert one.knobs().kl_gate is None
    observed(one, 0.5)
    observed(one, 0.4)
    assert one.knobs().kl_gate == (pytest.approx(0.5 - RATE * 0.1) if enabled else None)
    again = scheduler(kl_gate=KlGateConfig(enabled=enabled))
    again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert again.knobs() == one.knobs()


def test_a_gate_without_a_kl_term_is_refused():
    gate = SchedulerConfig(kl_gate=KlGateConfig(enabled=True))
    with pytest.raises(ConfigError, match="scheduler.kl_gate: gates the KL term"):
        Config(scheduler=gate, learner=LearnerConfig(kl="none"))
    for change in (dict(quantile=0.0), dict(width=0.0)):
        with pytest.raises(ConfigError, match="scheduler.kl_gate"):
            KlGateConfig(**change)
