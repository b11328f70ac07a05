"""Learner state cut one way and read back cut another way."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsched.config import ConfigError
from fastsched.engines.learner.shards import KINDS, Fragment, ShardReader, write_shards

SIZES = {"embed": 37, "head": 5, "norm": 1}


def cut(boundaries: list[int], padding: int) -> list[list[Fragment]]:
    """All parameters one after another, cut into one flat shard a rank at `boundaries`; `padding` elements lie before each shard."""
    total, out = sum(SIZES.values()), []
    edges = [0, *sorted(boundaries), total]
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        fragments, at = [], 0
        for name, size in SIZES.items():
            begin, end = max(low, at), min(high, at + size)
            if begin < end:
                fragments.append(Fragment(name, 0, padding + begin - low, begin - at, end - begin))
            at += size
        out.append(fragments)
    return out


def flat(fragments: list[Fragment], padding: int, kind: int) -> torch.Tensor:
    shard = torch.full((padding + sum(f.size for f in fragments),), -1.0)
    for f in fragments:
        shard[f.start:f.start + f.size] = kind * 1000 + list(SIZES).index(f.name) * 100 + torch.arange(f.begin, f.begin + f.size)
    return shard


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 43), max_size=4), st.lists(st.integers(0, 43), max_size=4), st.integers(0, 3), st.integers(0, 3))
def test_any_cut_is_read_under_any_other(tmp_path_factory, written, read, padding, other_padding):
    folder = tmp_path_factory.mktemp("shards")
    for rank, layout in enumerate(cut(written, padding)):
        state = {kind: [flat(layout, padding, k)] for k, kind in enumerate(KINDS)}
        write_shards(folder / f"shards-{rank}.safetensors", state, layout, step=7)
    with ShardReader(folder) as reader:
        assert reader.step == 7 and reader.ranks == len(written) + 1
        for layout in cut(read, other_padding):
            for k, kind in enumerate(KINDS):
                out = torch.full_like(flat(layout, other_padding, k), -1.0)
                for fragment in layout:
                    reader.read_into(out, kind, fragment)
                np.testing.assert_array_equal(out, flat(layout, other_padding, k))


def test_what_the_checkpoint_does_not_hold_is_named(tmp_path):
    layout = [Fragment("embed", 0, 0, 0, 4)]
    write_shards(tmp_path / "shards-0.safetensors", {kind: [torch.zeros(4)] for kind in KINDS}, layout, step=0)
    with ShardReader(tmp_path) as reader:
        with pytest.raises(ConfigError, match="holds 4 of 6 values of embed.*another model"):
            reader.read_into(torch.zeros(6), "master", Fragment("embed", 0, 0, 0, 6))
        with pytest.raises(ConfigError, match="0 of 1 values of lm_head"):
            reader.read_into(torch.zeros(1), "master", Fragment("lm_head", 0, 0, 0, 1))
    with pytest.raises(ConfigError, match="holds no shards"):
        ShardReader(tmp_path / "nothing")
