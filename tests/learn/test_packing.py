import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsched.config import ConfigError
from fastsched.learn.packing import Sample, dummy, pack
from fastsched.types import COMMON


def make(groups, rng, keep_share=0.7, common=0):
    """Samples of groups [(prompt length, [response lengths])], every token id distinct but the first `common` of all prompts."""
    out, next_id = [], iter(range(1, 10**6))
    for g, (p, lengths) in enumerate(groups):
        prompt = [*range(-common, 0), *(next(next_id) for _ in range(p))]
        for n in lengths:
            keep = rng.random(n) < keep_share
            tokens = [next(next_id) for _ in range(n)]
            out.append(Sample(g, prompt, tokens, rng.random(n).astype(np.float32), float(rng.normal()), keep, 0.25))
    return out


def shapes_of(shortest):
    return st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(shortest, 7), min_size=1, max_size=4)), min_size=1, max_size=5)


shapes = shapes_of(1)


@settings(max_examples=60, deadline=None)
@given(shapes_of(0), st.integers(0, 40), st.booleans(), st.integers(0, 3), st.integers(0, 5))
def test_every_kept_token_once_with_its_own_context(groups, slack, share, seed, common):
    """Whatever the packing: each kept token is a target once, predicted from the position whose visible context is its own. The fault: an
    empty response shifted the targets of those behind it by one."""
    samples = make(groups, np.random.default_rng(seed), common=common)
    longest = max(len(s.prompt_ids) + sum(max(len(t.token_ids) - 1, 0) for t in samples if t.group == s.group) for s in samples)
    found = {}
    for micro in pack(samples, token_budget=longest + slack, share_prompts=share):
        b, w = micro.input_ids.shape
        assert b * w <= longest + slack
        for r in range(len(micro.rows)):
            row, at = divmod(int(micro.rows[r]), w)
            sample, t = samples[micro.responses[r]], int(micro.offsets[r])
            g, k = micro.group_ids[row], micro.response_ids[row]
            visible = [int(micro.input_ids[row, j]) for j in range(at + 1) if g[j] in (g[at], COMMON) and k[j] in (0, k[at])]
            assert visible == [*sample.prompt_ids, *sample.token_ids[:t]]
            assert micro.position_ids[row, at] == len(sample.prompt_ids) + t - 1
            assert micro.targets[r] == sample.token_ids[t] and micro.sampler_logp[r] == sample.sampler_logp[t]
            assert micro.advantages[r] == np.float32(sample.advantage) and micro.token_weights[r] == np.float32(sample.weight)
            assert (micro.responses[r], t) not in found
            found[micro.responses[r], t] = True
    assert set(found) == {(i, t) for i, s in enumerate(samples) for t in np.flatnonzero(s.keep)}


@settings(max_examples=200, deadline=None)
@given(shapes, st.integers(0, 60))
def test_rows_as_wide_as_the_budget_are_one_a_micro_batch(groups, slack):
    """What flash-attn's varlen path takes: position ids of one row mark where a sequence begins."""
    samples = make(groups, np.random.default_rng(0))
    budget = max(len(s.prompt_ids) + len(s.token_ids) - 1 for s in samples) + slack
    begun = 0
    for micro in pack(samples, token_budget=budget, share_prompts=False, row_width=budget):
        assert micro.input_ids.shape[0] == 1 and micro.input_ids.shape[1] <= budget and (micro.group_ids >= 0).all()
        at = micro.position_ids[0]
        assert at[0] == 0 and ((at[1:] == 0) | (at[1:] == at[:-1] + 1)).all()
        begun += int((at == 0).sum())
    assert begun == len(samples)


def test_sharing_prompts_saves_their_copies():
    samples = make([(30, [16] * 8)] * 4, np.random.default_rng(0))
    tokens = lambda share: sum(m.input_ids.size for m in pack(samples, token_budget=2000, share_prompts=share))
    assert tokens(True) == 4 * (30 + 8 * 15) and tokens(False) == 32 * 45


def test_a_common_beginning_stands_once_a_row():
    samples = make([(10, [4] * 16)] * 6, np.random.default_rng(0), common=60)
    micro, = pack(samples, token_budget=1024, share_prompts=True)
    assert micro.input_ids.shape == (1, 60 + 6 * (10 + 16 * 3)) and (micro.group_ids == COMMON).sum() == 60
    narrow = pack(samples, token_budget=200, share_prompts=True)
    assert [m.input_ids.shape for m in narrow] == [(1, 60 + 2 * 58)] * 3


def test_groups_are_told_apart_by_row_not_by_prompt_text():
    """pitfalls E4: two dataset rows with the same prompt stay two groups."""
    samples = [Sample(g, [5, 6], [7, 8], np.zeros(2, np.float32), 0.0, np.ones(2, bool), 1.0) for g in (0, 0, 1, 1)]
    micro, = pack(samples, token_budget=100, share_prompts=True)
    assert micro.groups == (0, 1) and micro.input_ids.tolist() == [[5, 6, 7, 7, 6, 7, 7]]


def test_an_item_over_the_budget_names_key_and_number():
    samples = make([(30, [16] * 8)], np.random.default_rng(0))
    with pytest.raises(ConfigError, match="learner.micro_batch_tokens: 100 is less than the 150 tokens"):
        pack(samples, token_budget=100, share_prompts=True)


def test_dummy_has_shape_but_no_weight():
    micro, = pack(make([(3, [4, 2])], np.random.default_rng(0)), token_budget=100, share_prompts=True)
    empty = dummy(micro)
    assert empty.groups == () and not empty.token_weights.any() and (empty.input_ids == micro.input_ids).all()
