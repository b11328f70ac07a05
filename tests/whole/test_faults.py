"""The harness of bench.faults: it must see a loss, and its faults must strike."""

import json

import pytest

from bench.faults import planted as faults


@pytest.fixture
def runs(tmp_path):
    """Two finished runs that are equal, as far as the harness looks."""
    for name in ("a", "b"):
        checkpoint = tmp_path / name / f"checkpoints/step-{faults.STEPS}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "COMPLETE").write_text(json.dumps({"files": {"policy.safetensors": [5, "abc"]}}))
        lines = "".join(f"{step},0.5,{ord(name)}\n" for step in range(1, faults.STEPS + 1))
        (tmp_path / name / "metrics.csv").write_text(f"step,loss,t_step\n{lines}")
        (tmp_path / name / "samples.jsonl").write_text('{"step": 1}\n')
        (tmp_path / name / "evals.jsonl").write_text("")
    return tmp_path


def edit(path, change) -> None:
    path.write_text(change(path.read_text()))


LAST = f"checkpoints/step-{faults.STEPS}/COMPLETE"
LOSSES = {
    "metrics.csv": lambda folder: edit(folder / "metrics.csv", lambda text: text.replace("7,0.5", "7,0.51")),
    "rows": lambda folder: edit(folder / "metrics.csv", lambda text: text.rsplit("\n", 2)[0] + "\n"),
    "samples.jsonl": lambda folder: edit(folder / "samples.jsonl", lambda text: ""),
    "policy.safetensors": lambda folder: edit(folder / LAST, lambda text: text.replace("abc", "abd")),
}


@pytest.mark.parametrize("what", LOSSES)
def test_the_harness_sees_what_was_lost(runs, what):
    assert faults.difference(runs / "a", runs / "b") == "nothing"  # clocks may differ
    LOSSES[what](runs / "a")
    found = faults.difference(runs / "a", runs / "b")
    assert found != "nothing" and ("step 7: loss differ" if what == "metrics.csv" else what) in found


def test_a_loss_is_exit_code_1_and_what_is_done_is_not_done_again(runs, monkeypatch):
    calls = []
    planned = {"fine": lambda work: calls.append("fine") or ("ok", "nothing"), "bad": lambda work: calls.append("bad") or ("ok", "a step")}
    done = faults.run_all(runs, planned, [""], again=False)
    assert [o.lost for o in done] == ["nothing", "a step"] and calls == ["fine", "bad"]
    assert len(faults.run_all(runs, planned, [""], again=False)) == 2 and calls == ["fine", "bad"]
    faults.run_all(runs, planned, ["bad"], again=True)
    assert calls == ["fine", "bad", "bad"]
    faults.write_table(runs, done, runs / "table")
    assert "| bad | ok | a step |" in (runs / "table/faults.md").read_text()


def test_part_of_the_faults_leaves_the_committed_table_alone(runs, monkeypatch):
    """The fault: `--only` wrote a table of one row over the one of all."""
    planned = {"fine": lambda work: ("ok", "nothing"), "bad": lambda work: ("ok", "a step")}
    results, work = runs / "results", runs / "work"
    monkeypatch.setattr(faults, "RESULTS", results)
    monkeypatch.setattr(faults, "faults", lambda steps: {f"{name} in {len(steps)}": run for name, run in planned.items()})

    def main(*arguments):
        monkeypatch.setattr("sys.argv", ["faults", "--work", str(work), *arguments])
        return faults.main()

    assert main("--only", "fine") == 0 and (work / "faults.md").exists() and not results.exists()
    assert main("--steps", "1", "2") == 1 and not results.exists()
    assert main("--only", "fine", "--out", str(runs / "other")) == 1 and "| fine in 12 |" in (runs / "other/faults.md").read_text()
    assert main() == 1 and "| bad in 12 | ok | a step |" in (results / "faults.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_f1_f3_kill_9_in_every_part_of_a_step_and_a_resume_after_each(tmp_path, monkeypatch):
    """Six steps of one run, a kill in each, in learn, sync, save, log and rollout: the same bits as a run without."""
    monkeypatch.setattr(faults, "STEPS", 6)
    saw, lost = faults.killed(tmp_path, 1, [1, 2, 3, 4, 5, 6])
    assert lost == "nothing" and saw.startswith("resumed step-5")
