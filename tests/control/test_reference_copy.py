import json
import math
from dataclasses import replace

import numpy as np
import pytest
from test_scheduler import outcomes, scheduler, stats

from fastsched.config import Config, ConfigError, LearnerConfig, SchedulerConfig


def run(one, kls):
    """Whether the reference was renewed before each step whose measured KL is given."""
    copies = []
    for kl in kls:
        selection, knobs = one.next_prompts(), one.knobs()
        copies.append(knobs.copy_reference)
        one.observe(outcomes(selection, np.zeros((len(selection.rows), 2))), replace(stats(), kl=kl))
    return copies


def test_every_k_steps():
    assert run(scheduler(copy_every=3), [0.0] * 8) == [False] * 3 + [True, False, False, True, False]
    assert not any(run(scheduler(), [9.0] * 8))


def test_when_the_moving_average_of_the_kl_is_too_large():
    """beta = 0.5: averages 0.1, 0.25, then above 0.3; after a renewal the average starts anew from the next KL."""
    kls = [0.1, 0.4, 0.4, 0.01, 0.9, math.nan, 0.0]
    assert run(scheduler(copy_kl=0.3, statistics_beta=0.5), kls) == [False, False, False, True, False, True, False]


def test_whichever_comes_first():
    assert run(scheduler(copy_every=2, copy_kl=0.3, statistics_beta=0.0), [0.9, 0.0, 0.0, 0.0]) == [False, True, False, True]


def test_the_decision_resumes_exactly():
    one = scheduler(copy_every=4, copy_kl=0.3, statistics_beta=0.9)
    run(one, [0.1, 0.5, 0.2])
    again = scheduler(copy_every=4, copy_kl=0.3, statistics_beta=0.9)
    again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    kls = [0.2, 0.6, 0.1, 0.4, 0.9, 0.9]
    assert run(again, kls) == run(one, kls) and again.state_dict() == one.state_dict()


@pytest.mark.parametrize("reference, copy_every", [("copy", 0), ("average", 5)])
def test_when_and_what_belong_together(reference, copy_every):
    with pytest.raises(ConfigError, match="learner.reference: copy needs scheduler.copy_every"):
        Config(learner=LearnerConfig(reference=reference), scheduler=SchedulerConfig(copy_every=copy_every))
