import pytest
import torch
from fastsched_kernels.testing import seeded
from fastsched_kernels.trajectory import decile_sums, trajectory_keep


@pytest.mark.parametrize(
    "s, cuts",
    [
        (0.979355, (0, 1, 9, 97, 7834)),
        (0.883548, (0, 1, 8, 88, 7068)),
        (0.489677, (0, 0, 4, 48, 3917)),
        (0.010645, (0, 0, 0, 1, 85)),
        (0.0, (0, 0, 0, 0, 0)),
        (1.0, (0, 1, 9, 99, 7999)),
        (0.29, (0, 0, 2, 29, 2320)),
    ],
)
def test_suffix_keeps_from_the_published_cut(s, cuts):
    lengths = torch.tensor([1, 2, 10, 100, 8000])
    out = trajectory_keep(lengths, s)
    for i, cut in enumerate(cuts):
        keep = out.keep[out.sequence == i]
        assert torch.equal(keep, torch.arange(int(lengths[i])) >= cut)


def test_empty_responses_and_scalar_tensors():
    out = trajectory_keep(torch.tensor([0, 3, 0, 2]), torch.tensor(0.5), total=5)
    assert out.keep.tolist() == [False, True, True, False, True] and out.sequence.tolist() == [1, 1, 1, 3, 3]
    assert trajectory_keep(torch.zeros(0, dtype=torch.long), 0.5).keep.numel() == 0


def test_decile_is_the_tenth_of_the_response():
    out = trajectory_keep(torch.tensor([10, 1, 25]), 0.0)
    assert out.decile[:10].tolist() == list(range(10)) and out.decile[10] == 0
    assert out.decile[11:].tolist() == [t * 10 // 25 for t in range(25)]


def test_entropy_keeps_the_highest_of_each_response():
    lengths, entropy = torch.tensor([4, 1, 5]), torch.tensor([0.1, 0.9, 0.5, 0.9, 0.0, 3.0, 1.0, 2.0, 5.0, 4.0])
    out = trajectory_keep(lengths, 0.6, proxy="entropy", entropy=entropy)
    assert out.keep.tolist() == [False, True, False, True, True, False, False, False, True, True]
    assert trajectory_keep(torch.tensor([100]), 0.99, proxy="entropy", entropy=torch.arange(100.0)).keep.sum() == 1
    with pytest.raises(ValueError, match="needs the entropy"):
        trajectory_keep(lengths, 0.5, proxy="entropy")


def test_prefix_keeps_the_beginning():
    out = trajectory_keep(torch.tensor([10, 3]), 0.75, proxy="prefix")
    assert out.keep.tolist() == [True] * 3 + [False] * 7 + [True, False, False]


def test_decile_sums_count_kept_tokens_only():
    out = trajectory_keep(torch.tensor([20, 7]), 0.5)
    entropy, kl = torch.rand(27, generator=seeded(3)), torch.rand(27, generator=seeded(4))
    masked = torch.where(out.keep, entropy, torch.nan)
    sums = decile_sums(out.decile, masked, kl, out.keep)
    for d in range(10):
        rows = out.keep & (out.decile == d)
        assert sums.count[d] == rows.sum()
        torch.testing.assert_close(sums.entropy[d], entropy[rows].double().sum())
        torch.testing.assert_close(sums.kl[d], kl[rows].double().sum())
