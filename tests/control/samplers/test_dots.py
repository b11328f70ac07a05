from dataclasses import replace

import numpy as np
import pytest

from fastsched.config import ConfigError, DotsConfig, SchedulerConfig
from fastsched.control.samplers import dots
from fastsched.control.samplers.dots import PredictingSampler, attention, calibration
from fastsched.control.window import unknown_success
from fastsched.types import Features, Outcomes

N, D = 600, 16
BINS, SIZES = np.zeros(N, np.uint16), np.array([N])
UNKNOWN = unknown_success(1, 0.5)


def features(rows=N):
    """The first coordinate of the embedding is the prompt's easiness, from -1 to 1, beside noise."""
    rng = np.random.default_rng(0)
    embedding = 0.3 * rng.standard_normal((rows, D))
    embedding[:, 0] = np.linspace(-1, 1, rows)
    return Features(np.zeros(rows, np.int32), np.zeros(rows, np.float32),
                    (embedding / np.linalg.norm(embedding, axis=1, keepdims=True)).astype(np.float16))


def sampler(floor=0.0, prompts=20, **options):
    cfg = SchedulerConfig(kind="dots", weight_floor=floor, dots=DotsConfig(**options))
    return PredictingSampler(cfg, BINS, SIZES, prompts, 0, features())


def true_p(rows):
    return 1 / (1 + np.exp(-4 * (rows / N - 0.3)))  # one half at 30 % of the rows


def drive(one, steps, prompts=20, seed=0):
    rng, drawn = np.random.default_rng(seed), []
    for t in range(steps):
        selection = one.draw(prompts, replace(UNKNOWN, steps=t))
        rewards = (rng.random((prompts, 8)) < true_p(selection.rows)[:, None]).astype(float)
        counts = np.ones(rewards.shape, np.int64)
        one.observe(Outcomes(selection.rows, selection.bins, rewards, counts, counts == 0), replace(UNKNOWN, steps=t))
        drawn.append(selection.rows)
    return drawn


def test_attention_is_the_published_average():
    rng = np.random.default_rng(0)
    q, e, p = rng.standard_normal((5, D)), rng.standard_normal((7, D)), rng.random(7)
    weights = np.exp(q @ e.T / np.sqrt(D))
    np.testing.assert_allclose(attention(q.astype(np.float32), e.astype(np.float32), p), weights @ p / weights.sum(1), rtol=1e-5)


def test_calibration_is_least_squares_on_references_left_out_in_turn():
    embedding, rows = features().embedding.astype(np.float32), np.arange(0, N, 5)
    p = true_p(rows)
    scale, bias = calibration(embedding[rows], p)
    assert scale > 5  # attention over unit vectors hardly moves: the scale makes up for it
    others = np.setdiff1d(np.arange(N), rows)
    predicted = scale * attention(embedding[others], embedding[rows], p) + bias
    assert np.corrcoef(predicted, true_p(others))[0, 1] > 0.6
    assert np.polyfit(predicted, true_p(others), 1)[0] == pytest.approx(1, abs=0.3)
    assert predicted.mean() == pytest.approx(true_p(others).mean(), abs=0.05)


def test_where_embeddings_say_nothing_the_prediction_is_the_mean():
    rng = np.random.default_rng(1)
    scales = [calibration(rng.standard_normal((200, D)).astype(np.float32), rng.random(200))[0] for _ in range(6)]
    embedding = features().embedding.astype(np.float32)[::3]
    assert np.mean(scales) < 0.3 * calibration(embedding / 1, true_p(np.arange(0, N, 3)))[0] and min(scales) >= 0
    assert calibration(np.ones((5, D), np.float32), np.array([0, 0.5, 1, 0.5, 0])) == (0.0, 0.4)
    assert calibration(np.zeros((0, D), np.float32), np.zeros(0)) == (1.0, 0.0)


def test_prompts_predicted_near_one_half_are_drawn():
    one = sampler(pool=8)
    drawn = drive(one, 60)
    distance = [np.abs(true_p(rows) - 0.5).mean() for rows in drawn]
    at_random = np.abs(true_p(np.arange(N)) - 0.5).mean()
    assert np.mean(distance[30:]) < 0.75 * at_random and np.mean(distance[:2]) > 0.75 * at_random
    assert all(len(set(rows.tolist())) == 20 for rows in drawn)


def test_temperature_and_pool_decide_how_strictly(monkeypatch):
    distance = lambda pool: np.mean([np.abs(true_p(rows) - 0.5).mean() for rows in drive(sampler(pool=pool), 60)[30:]])
    strict, narrow = distance(8), distance(1)
    monkeypatch.setattr(dots, "TEMPERATURE", 10.0)
    assert strict < 0.8 * distance(8) and strict < 0.8 * narrow


def test_references_are_the_prompts_rolled_out_last_and_stand_until_the_next_refresh(monkeypatch):
    monkeypatch.setattr(dots, "REFERENCES", 30)
    monkeypatch.setattr(dots, "REFRESH", 3)
    one = sampler()
    drawn = drive(one, 3)
    assert len(one.reference_rows) == 0
    drawn += drive(one, 1, seed=1)  # step 0 again: a refresh
    assert len(one.reference_rows) == 30 and set(one.reference_rows.tolist()) <= set(np.concatenate(drawn[:3]).tolist())
    assert len(one.recent) == 30 and set(one.recent) >= set(drawn[3].tolist())
    before = one.reference_rows.tolist()
    one.draw(20, replace(UNKNOWN, steps=1))
    assert one.reference_rows.tolist() == before
    one.draw(20, replace(UNKNOWN, steps=3))
    assert one.reference_rows.tolist() == list(one.recent)


def test_the_floor_visits_every_prompt():
    one, seen = sampler(floor=0.5), set()
    for rows in drive(one, 61):
        seen |= set(rows.tolist())
    assert seen == set(range(N))


def test_embeddings_are_needed_and_must_be_those_of_the_data():
    cfg = SchedulerConfig(kind="dots")
    with pytest.raises(ConfigError, match="fastsched cluster"):
        PredictingSampler(cfg, BINS, SIZES, 20, 0)
    with pytest.raises(ConfigError, match="embeddings of 599 prompts, the data has 600.*fastsched cluster"):
        PredictingSampler(cfg, BINS, SIZES, 20, 0, features(N - 1))


@pytest.mark.parametrize("changes", [{"pool": 0}, {"buffer": 0}, {"max_age": 0}, {"replay": 1.0}])
def test_options_that_make_no_sense_are_refused(changes):
    with pytest.raises(ConfigError, match="scheduler.dots"):
        DotsConfig(**changes)
