import math

import numpy as np
import pytest
import torch

from fastsched.config import ConfigError, RolloutConfig
from fastsched.learn.corrections import BOUNDS, LOG_LIMIT, bounds, correct, log_ratio

RHO = torch.tensor([0.4, 1.0, 3.0, 0.9, 1.1])
RESPONSE = torch.tensor([0, 0, 0, 1, 1])
LIVE = torch.ones(5, dtype=torch.bool)


def weigh(kind, rho=RHO, live=LIVE, response=RESPONSE, **options):
    cfg = RolloutConfig(correction=kind, **{f"correction_{k}": v for k, v in options.items()})
    return correct(cfg, rho.log(), torch.zeros_like(rho), response, live)


@pytest.mark.parametrize("kind, expected", [
    ("token_tis", [0.4, 1.0, 2.0, 0.9, 1.1]),
    ("sequence_tis", [1.2, 1.2, 1.2, 0.99, 0.99]),
    ("token_mis", [0.0, 1.0, 0.0, 0.9, 1.1]),
    ("sequence_mis", [1.2, 1.2, 1.2, 0.99, 0.99]),
    ("icepop", [0.0, 1.0, 3.0, 0.9, 1.1]),
    ("geometric", [0.0, 0.0, 0.0, 0.0, 0.0]),
])
def test_weights_at_the_published_bounds(kind, expected):
    out = weigh(kind)
    torch.testing.assert_close(out.weight, torch.tensor(expected), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.ratio, RHO)
    assert out.rejected.tolist() == [w == 0 for w in expected]
    assert out.capped.tolist() == ([False, False, True, False, False] if kind == "token_tis" else [False] * 5)


def test_bounds_are_options():
    assert weigh("token_tis", cap=1.05).weight.tolist() == pytest.approx([0.4, 1.0, 1.05, 0.9, 1.05])
    assert weigh("sequence_tis", cap=1.1).weight.tolist() == pytest.approx([1.1] * 3 + [0.99] * 2)
    assert weigh("sequence_mis", cap=1.1).weight.tolist() == pytest.approx([0.0] * 3 + [0.99] * 2)
    assert weigh("token_mis", floor=0.3, cap=1.05).weight.tolist() == pytest.approx([0.4, 1.0, 0.0, 0.9, 0.0])
    assert weigh("geometric", floor=0.99, cap=1.01).weight.tolist() == [0, 0, 0, 1, 1]  # geometric means 1.0627 and 0.99499
    assert bounds(RolloutConfig(correction="icepop")) == BOUNDS["icepop"] == (0.5, 5.0)


@pytest.mark.parametrize("length", [10, 100, 1000])
def test_sequence_forms_are_sums_and_means_of_log_ratios(length):
    """A drift of 1 % a token: the product leaves every bound as the response grows, the geometric mean does not see the length."""
    rho, response, live = torch.full((length,), 1.01), torch.zeros(length, dtype=torch.long), torch.ones(length, dtype=torch.bool)
    product = min(1.01**length, math.exp(LOG_LIMIT))
    tis = weigh("sequence_tis", rho, live, response)
    assert tis.weight.tolist() == pytest.approx([min(product, 2.0)] * length, rel=1e-4) and bool(tis.capped.all()) == (length > 69)
    mis = weigh("sequence_mis", rho, live, response)
    assert mis.weight.tolist() == pytest.approx([product if product <= 3 else 0.0] * length, rel=1e-4)
    assert weigh("geometric", rho, live, response, cap=1.02).weight.eq(1).all()
    assert weigh("geometric", rho, live, response).weight.eq(0).all()


def test_a_missing_log_probability_has_ratio_exactly_one():
    old, sampler = torch.tensor([-1.0, -2.0, -3.0, -50.0]), torch.tensor([math.nan, -2.5, -math.inf, -1.0])
    assert log_ratio(old, sampler).tolist() == [0.0, 0.5, 0.0, -LOG_LIMIT]
    assert log_ratio(sampler, old)[0] == 0
    response, live = torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool)
    out = correct(RolloutConfig(correction="sequence_tis"), old[:3], sampler[:3], response, live)
    assert out.ratio[[0, 2]].tolist() == [1.0, 1.0] and out.weight.tolist() == pytest.approx([math.exp(0.5)] * 3)


def test_products_take_the_tokens_that_carry_loss():
    live = torch.tensor([True, True, False, True, True])
    assert weigh("sequence_tis", live=live).weight.tolist() == pytest.approx([0.4] * 3 + [0.99] * 2)


def test_veto_drops_the_whole_response():
    rho = torch.tensor([5e-5, 1.0, 1.0, 0.9, 1.1])
    assert weigh("token_tis", rho, veto=1e-4).weight.tolist() == pytest.approx([0, 0, 0, 0.9, 1.1])
    assert weigh("token_tis", rho).weight.tolist() == pytest.approx(rho.tolist())


def test_weights_are_detached_and_extreme_ratios_finite():
    old = torch.tensor([1000.0, -1000.0], requires_grad=True)
    cfg, live = RolloutConfig(correction="token_tis", correction_cap=1e30), torch.ones(2, dtype=torch.bool)
    out = correct(cfg, old, torch.zeros(2), torch.tensor([0, 1]), live)
    assert not out.weight.requires_grad and out.weight.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


@pytest.mark.parametrize("options, words", [
    (dict(correction="token_tis", correction_floor=0.5), "token_tis has no lower bound"),
    (dict(correction="icepop", correction_floor=2.0, correction_cap=1.0), "correction_floor <= correction_cap"),
    (dict(correction="icepop", correction_veto=-1.0), "correction_veto >= 0"),
])
def test_bounds_that_make_no_sense_are_named(options, words):
    with pytest.raises(ConfigError, match=words):
        RolloutConfig(**options)


def test_kinds_differ():
    found = [weigh(kind, RHO * 1.9, cap=2.5).weight.numpy() for kind in BOUNDS]
    assert len({tuple(np.round(w, 5)) for w in found}) >= 5
