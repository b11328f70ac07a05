"""Comparisons of runs: which runs are trained, kept, resumed or refused. Training itself is replaced by synthetic runs."""

import shutil
from types import SimpleNamespace

import pytest
from synthetic_run import write_run

from bench.learning import arms
from bench.learning.arms import Arm, Comparison, check_settings, chosen, finished, train_all
from bench.learning.compare import window_arms
from fastsched.config import ConfigError
from fastsched.config.arguments import config_to_yaml
from fastsched.report.runs import last, load_run

ARMS = {"uniform": Arm(("--scheduler.kind", "uniform")), "sec": Arm(("--scheduler.kind", "sec"), cluster=True)}
STEPS = 4


def comparison(tmp_path, options=(), **more):
    settings = {"arms": ARMS, "seeds": (0, 1), "options": ("--train.steps", str(STEPS), *options), **more}
    return Comparison("cmp", "tiny-cpu", runs=tmp_path, **settings)


def write_like(plan, arm, seed, steps=STEPS):
    """What a run of `steps` steps would have left, checkpoint included."""
    folder = write_run(plan.folder(arm, seed), steps, seed=seed, total=STEPS, every=STEPS)
    (folder / "config.yaml").write_text(config_to_yaml(plan.config(arm, seed)))
    (folder / f"checkpoints/step-{steps}").mkdir(parents=True)
    (folder / f"checkpoints/step-{steps}/COMPLETE").touch()
    return folder


@pytest.fixture
def trained(monkeypatch):
    """Commands that would have been run; `train` leaves a run behind, unless told to fail at that command."""
    calls, state = [], SimpleNamespace(plan=None, fail_at=None, code=0)

    def start(command):
        name, *rest = command[3:]
        calls.append((name, rest))
        if state.fail_at == len(calls):
            return SimpleNamespace(wait=lambda: state.code)
        if name == "train":
            folder = rest[rest.index("--run_dir") + 1]
            arm, seed = folder.removeprefix(str(state.plan.runs / "cmp-")).split("-seed-")
            shutil.rmtree(folder, ignore_errors=True)
            write_like(state.plan, arm, int(seed))
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(arms, "subprocess", SimpleNamespace(Popen=start))
    state.calls = calls
    return state


def names(trained):
    return [(name, rest[rest.index("--run_dir") + 1].rpartition("cmp-")[2] if name == "train" else None, "--resume" in rest)
            for name, rest in trained.calls]


def test_arms_take_turns_and_clusters_come_first(tmp_path, trained):
    trained.plan = plan = comparison(tmp_path, overrides=("--data.size", "500"))
    train_all(plan)
    assert names(trained) == [("train", "uniform-seed-0", False), ("cluster", None, False), ("train", "sec-seed-0", False),
                              ("train", "uniform-seed-1", False), ("cluster", None, False), ("train", "sec-seed-1", False)]
    cluster, train = trained.calls[1][1], trained.calls[2][1]
    assert train[:len(cluster)] == cluster and cluster[-2:] == ["--data.size", "500"]
    assert plan.config("sec", 1).scheduler.kind == "sec" and plan.config("sec", 1).train.seed == 1
    assert plan.config("sec", 1).data.size == 500


def test_an_interrupted_comparison_goes_on_where_it_stopped(tmp_path, trained):
    trained.plan = plan = comparison(tmp_path)
    trained.fail_at, trained.code = 4, 130
    with pytest.raises(SystemExit) as stopped:
        train_all(plan)
    assert stopped.value.code == 130 and len(trained.calls) == 4
    shutil.rmtree(plan.folder("sec", 0))
    write_like(plan, "sec", 0, steps=3)  # interrupted at its third step
    trained.calls.clear()
    trained.fail_at = None
    train_all(plan)
    assert [call for call in names(trained) if call[0] == "train"] == [
        ("train", "sec-seed-0", True), ("train", "uniform-seed-1", False), ("train", "sec-seed-1", False)]
    trained.calls.clear()
    train_all(plan)
    assert trained.calls == []


def test_ctrl_c_waits_until_the_run_has_saved(monkeypatch):
    waits = []

    def wait():
        waits.append(len(waits))
        if len(waits) == 1:
            raise KeyboardInterrupt
        return 130

    monkeypatch.setattr(arms, "subprocess", SimpleNamespace(Popen=lambda command: SimpleNamespace(wait=wait)))
    with pytest.raises(SystemExit) as stopped:
        arms.command("train", "--preset", "tiny-cpu")
    assert stopped.value.code == 130 and len(waits) == 2


def test_a_guard_ends_one_run_and_a_bad_command_the_comparison(tmp_path, trained):
    trained.plan = comparison(tmp_path)
    trained.fail_at, trained.code = 1, 3
    train_all(trained.plan)
    assert len(trained.calls) == 6
    trained.plan = comparison(tmp_path / "other")
    trained.calls.clear()
    trained.code = 2
    with pytest.raises(SystemExit) as stopped:
        train_all(trained.plan)
    assert stopped.value.code == 2 and len(trained.calls) == 1


def test_a_run_of_other_settings_is_refused_before_anything_runs(tmp_path, trained):
    trained.plan = comparison(tmp_path)
    train_all(trained.plan)
    trained.calls.clear()
    with pytest.raises(ConfigError, match="cmp-uniform-seed-0 holds a run of other settings: train.steps was 4 and is now 9"):
        train_all(comparison(tmp_path, ("--train.steps", "9")))
    with pytest.raises(ConfigError, match="scheduler.kind"):
        train_all(comparison(tmp_path / "new", arms={**ARMS, "odd": Arm(("--scheduler.kind", "odd"))}))
    assert trained.calls == []
    check_settings(tmp_path / "nothing", trained.plan.config("sec", 0))


def test_finished_means_last_step_saved_and_evaluated(tmp_path):
    plan = comparison(tmp_path)
    cfg = plan.config("uniform", 0)
    assert not finished(plan.folder("uniform", 0), cfg)
    folder = write_like(plan, "uniform", 0)
    assert finished(folder, cfg)
    assert not finished(folder, comparison(tmp_path, ("--train.steps", "5")).config("uniform", 0))
    budget = comparison(tmp_path, ("--train.steps", "9", "--train.rollout_budget", "256")).config("uniform", 0)
    assert finished(folder, budget)  # four steps of 64 responses
    short = comparison(tmp_path, ("--train.steps", "9", "--train.rollout_budget", "257")).config("uniform", 0)
    assert not finished(folder, short)
    tokens = int(last(load_run(folder), "tokens_total"))
    for allowed, enough in ((tokens, True), (tokens + 1, False)):
        limited = comparison(tmp_path, ("--train.steps", "9", "--train.token_budget", str(allowed)))
        assert finished(folder, limited.config("uniform", 0)) == enough
    evals = (folder / "evals.jsonl").read_text()
    (folder / "evals.jsonl").write_text(evals.splitlines(keepends=True)[0])
    assert not finished(folder, cfg)
    (folder / "evals.jsonl").write_text(evals)
    (folder / f"checkpoints/step-{STEPS}/COMPLETE").unlink()
    assert not finished(folder, cfg)


def test_arms_are_chosen_by_name():
    assert list(chosen(ARMS, ["sec"])) == ["sec"] and list(chosen(ARMS, None)) == ["uniform", "sec"]
    with pytest.raises(ConfigError, match="'spede' is none of uniform, sec"):
        chosen(ARMS, ["spede"])


def test_windows_are_arms_named_by_their_edges(tmp_path):
    plan = comparison(tmp_path, arms=window_arms([["0.35", "0.65"], ["0.40", "0.60"]]))
    assert [folder.name for folder in plan.folders()["window-0.35-0.65"]] == ["cmp-window-0.35-0.65-seed-0", "cmp-window-0.35-0.65-seed-1"]
    assert plan.config("window-0.35-0.65", 0).scheduler.window == (0.35, 0.65)
    assert plan.config("window-0.40-0.60", 0).scheduler.window == (0.40, 0.60)

