"""One rank and two under every ZeRO stage and accumulation: the same weights, average and metrics; checkpoints that cross all of it.

One rank runs in this process, two in one start of `distributed_worker.py`; every test below reads what they left.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from command_line import ROOT, environment
from distributed_worker import ACCUMULATIONS, BALANCED, STAGES, STEPS, WORKER, everything, resumes, splits

from fastsched.engines.models.tiny import random_tiny
from fastsched.engines.ranks import init_distributed, leave_distributed

CLOSE = 5e-5  # after four updates at lr 1e-3; Adam turns rounding of a small gradient into such a difference
TOGETHER = ("loss", "entropy", "kl", "drift", "grad_norm", "ratio_deviation", "kept_fraction", "flat_groups", "clip_fraction")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{ranks: (folder, [results of each rank])}."""
    root = tmp_path_factory.mktemp("ranks")
    model, one, two = str(random_tiny(root / "model", tied=True, seed=0)), root / "one", root / "two"
    one.mkdir(), two.mkdir()
    init_distributed()
    results: dict = {}
    splits(model, one, results)
    everything(model, one, results)
    (root / "extensions/deepspeed_shm_comm").mkdir(parents=True)
    (root / "extensions/deepspeed_shm_comm/lock").touch()  # G11: what a killed build leaves, for which a build would wait for ever
    clean = environment() | {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(root / "extensions"),
                             "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", WORKER, two, model, one]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    resumes(model, one, two, 3, results)
    leave_distributed()
    return {1: (one, [results]), 2: (two, [json.loads((two / f"results-{rank}.json").read_text()) for rank in range(2)])}


def load(folder, name: str, rank: int = 0) -> dict[str, np.ndarray]:
    with np.load(folder / f"{name} rank {rank}.npz") as file:
        return dict(file)


def distance(a: dict, b: dict) -> float:
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


def name_of(stage: int, accumulation: int) -> str:
    return f"stage {stage}, {accumulation} micro-batches"


@pytest.mark.timeout(600)
def test_g11_the_lock_of_a_killed_build_holds_nobody_up(runs):
    assert [p.name for p in (runs[2][0].parent / "extensions").rglob("*")] == ["deepspeed_shm_comm", "lock"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_average_and_metrics_do_not_depend_on_the_split(runs, stage, ranks):
    """D1-D4, G5, G10, E8: uneven lengths, uneven kept tokens, and a rank without a trained token are part of the four updates."""
    truth, (folder, results) = load(runs[1][0], name_of(1, 1)), runs[ranks]
    expected = runs[1][1][0][name_of(1, 1)]["stats"]
    for accumulation in ACCUMULATIONS:
        found = load(folder, name_of(stage, accumulation))
        assert distance(truth, found) < CLOSE
        for step in range(STEPS):
            seen = results[0][name_of(stage, accumulation)]["stats"][step]
            for metric in TOGETHER:
                assert seen[metric] == pytest.approx(expected[step][metric], rel=2e-3, abs=1e-6), (accumulation, step + 1, metric)


@pytest.mark.parametrize("ranks", [1, 2])
def test_accumulation_is_what_it_says_and_equal_on_all_ranks(runs, ranks):
    for stage in STAGES:
        for accumulation in ACCUMULATIONS:
            counts = [r[name_of(stage, accumulation)]["counts"] for r in runs[ranks][1]]
            assert counts[0][0] == accumulation and all(c == counts[0] for c in counts)
            assert accumulation < 4 or len(set(counts[0])) > 1  # G10: the number varies from step to step


@pytest.mark.parametrize("stage", BALANCED)
def test_balanced_ranks_train_the_same_in_fewer_micro_batches(runs, stage):
    """At steps 3 and 4 rank 1 has nothing of its own to train: half of rank 0's groups move there."""
    (folder, results), expected = runs[2], runs[1][1][0][name_of(1, 1)]["stats"]
    assert distance(load(runs[1][0], name_of(1, 1)), load(folder, f"balanced, stage {stage}")) < CLOSE
    found, apart = (results[0][name] for name in (f"balanced, stage {stage}", name_of(stage, 4)))
    for seen, wanted in zip(found["stats"], expected, strict=True):
        assert all(seen[metric] == pytest.approx(wanted[metric], rel=2e-3, abs=1e-6) for metric in TOGETHER)
    assert found["counts"] == results[1][f"balanced, stage {stage}"]["counts"]
    assert found["counts"][0] <= apart["counts"][0] and all(n < m for n, m in zip(found["counts"][2:], apart["counts"][2:], strict=True))


def test_mini_batches_gate_and_exchange_together_do_not_depend_on_the_ranks(runs):
    """Two optimizer steps a batch hold the same groups on one rank and on two, and every group trains where it was sent."""
    found = {ranks: [r["everything"] for r in results] for ranks, (_, results) in runs.items()}
    assert distance(load(runs[1][0], "everything"), load(runs[2][0], "everything")) < CLOSE
    for one, two in zip(found[1][0]["stats"], found[2][0]["stats"], strict=True):
        for metric in (*TOGETHER, "entropy_quantile"):
            assert two[metric] == pytest.approx(one[metric], rel=2e-3, abs=1e-6), metric
    assert all(np.isfinite(results[0]["stats"][0]["snr_bins"]).any() for results in found.values())
    assert found[2][0]["counts"] == found[2][1]["counts"] and min(found[1][0]["counts"]) > 1


@pytest.mark.parametrize("stage", STAGES)
def test_g1_the_average_moves_with_every_parameter(runs, stage):
    for results in runs[2][1]:
        moved = results[name_of(stage, 1)]["moved"]
        assert len(moved) == 2 * sum(name.startswith("average.") for name in moved) and all(moved.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_reference_is_whole_below_stage_3_and_partitioned_there(runs, ranks):
    """Between two uses no rank holds a whole parameter of it; that it follows the average is in the KL of every step above."""
    for results in runs[ranks][1]:
        held = [results[name_of(stage, 1)]["reference"] for stage in STAGES]
        assert held[0] == held[1] == held[2] > 1e5 and held[3] == 0


@pytest.mark.parametrize("stage", STAGES)
def test_both_ranks_hold_and_report_the_same_bits(runs, stage):
    """B4, K2: statistics and weights are reduced once and then equal, not nearly equal."""
    folder, results = runs[2]
    for accumulation in ACCUMULATIONS:
        name = name_of(stage, accumulation)
        assert repr(results[0][name]["stats"]) == repr(results[1][name]["stats"])
        assert distance(load(folder, name, 0), load(folder, name, 1)) == 0


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_resume_bit_for_bit(runs, stage):
    folder, results = runs[2]
    assert distance(load(folder, f"resumed 2 ranks, stage {stage}"), load(folder, name_of(stage, 1))) == 0
    assert repr(results[0][f"resumed 2 ranks, stage {stage}"][0]) == repr(results[0][name_of(stage, 1)]["stats"][3])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("written, read", [(1, 2), (2, 1)])
def test_g3_another_rank_count_and_stage_resume(runs, stage, written, read):
    """Weights and average arrive bit for bit, optimizer state too: the next update is the same up to rounding."""
    source, target = runs[written][0], runs[read][0]
    with np.load(source / f"at-3-stage-{stage}-rank-0.npz") as file:
        saved = dict(file)
    name = f"{written} ranks, stage {stage}"
    assert distance(saved, load(target, f"loaded {name}")) == 0
    after, straight = load(target, f"resumed {name}"), load(source, name_of(stage, 1))
    assert distance(straight, after) < CLOSE / 10 < distance(saved, after)


@pytest.mark.parametrize("field", ["kl_coef", "weights", "rows"])
def test_b4_ranks_that_decided_otherwise_stop_and_name_the_field(runs, field):
    for results in runs[2][1]:
        assert results[f"differs: {field}"].startswith(f"step 7: rank 1 decided {field} = ")


@pytest.mark.parametrize("stage", STAGES[1:])
def test_two_ranks_add_up_bf16_gradients_in_fp32(runs, stage):
    for results in runs[2][1]:
        error, norm, true = results[f"bf16, stage {stage}"]
        assert error < 1e-3 and norm == pytest.approx(true, rel=1e-3)


def test_a_late_rank_is_waited_for_as_long_as_asked(runs):
    assert [results["timeout"] for results in runs[2][1]] == ["0:12:57"] * 2


def test_a_rank_that_cannot_write_stops_all_and_leaves_the_checkpoints_before(runs):
    for results in runs[2][1]:
        assert results["unwritable"].startswith("checkpoint step-2 could not be written (rank 1: ") and "--resume" in results["unwritable"]
    assert runs[2][1][0]["left"] == ["step-1"]
    marker = json.loads((runs[2][0] / "unwritable/checkpoints/step-3/COMPLETE").read_text())  # room again: the same engine goes on
    assert marker["ranks"] == 2 and {"shards-0.safetensors", "shards-1.safetensors", "state.json"} <= marker["files"].keys()
