from bench.kernels.bench_head import Ratios, in_turns


def test_the_median_of_neighbours_is_reported():
    """A round in which the floor was slow is neither the result nor lost."""
    assert Ratios.of([(1.0, 1.1), (2.0, 1.2), (1.0, 1.4), (1.0, 1.2), (4.0, 4.4)]) == (1.1, 0.6, 1.4)


def test_floor_and_case_run_in_turns_after_one_round_that_does_not_count():
    calls = []
    times = in_turns(lambda: calls.append("floor"), lambda: calls.append("case"), 3)
    assert calls == ["floor", "case"] * 4 and len(times) == 3
