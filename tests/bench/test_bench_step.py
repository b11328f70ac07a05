import json
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.step import __main__ as command
from bench.step import pairs, peers, rounds, tables
from bench.step.job import Job
from bench.step.workload import WORKLOADS, config, drawn_rows
from fastsched.config import ConfigError
from fastsched.control.scheduler import Scheduler
from fastsched.control.window import observe_success
from fastsched.types import Outcomes


def steps(*totals, memory=1.0, length=8.0):
    return [{**dict.fromkeys(pairs.PHASES, t / 10), "total": t, "sync": 0.0, "memory_gb": memory + i, "length": length, "success": t / 100,
             "deviation": None} for i, t in enumerate(totals)]


def measured(**changes):
    found = pairs.compare([(steps(9, 1, 3), steps(9, 4, 4)), (steps(9, 4, 4), steps(9, 6, 6))])
    run = {"steps": steps(40, 60), "before": {"1 digit": 0.5, "2 digits": 0.25}, "after": {"1 digit": 1.0, "2 digits": 0.625}}
    trials = {"generate": {"seconds": 4.0, "memory_gb": 2.0, "deviation": None}, "vLLM": {"failed": "TypeError: a | b"}}
    return replace(tables.Measured("tiny", "32 prompts x 8 responses", "float32", "trl==1.16.0", "generate", "python -m bench.step", 2, 3,
                                   trials, {8: found}, {"FastSched": run, "TRL": run}, 0.75,
                                   {"machine": "a CPU, 2 cores", "date": "2026-12-01", "commit": "abc"}), **changes)


def test_ratios_are_taken_inside_a_round_and_the_first_step_does_not_count():
    rows = pairs.compare([(steps(9, 1, 3), steps(9, 4, 4)), (steps(9, 4, 4), steps(9, 6, 6)), (steps(9, 1, 1), steps(9, 9, 9))])
    assert rows["total"].ratio == pairs.Spread(2.0, 1.5, 9.0)  # 4/2, 6/4, 9/1; the ratio of the medians would be 3
    assert (rows["total"].ours, rows["total"].peer) == (2.0, 6.0)
    assert rows["learning"].ours == pytest.approx(0.2)
    assert rows["sync"] == pairs.Row(0.0, 0.0, None)
    assert rows["memory_gb"].ours == 3.0  # after the last step


def test_the_fastest_configuration_that_works_and_has_our_optimizer_is_chosen():
    trials = {"a": {"seconds": 3.0}, "b": {"seconds": 2.0}, "c": {"seconds": 1.0}, "d": {"failed": "no"}}
    assert pairs.fastest(trials, {"a": {}, "b": {}, "c": {"other": True}, "d": {}}) == "b"
    assert pairs.fastest({"d": {"failed": "no"}}, {"d": {}}) is None


def test_table_has_every_phase_memory_trials_and_the_curve(tmp_path):
    found = measured()
    text = tables.write(measured(lengths={8: found.lengths[8], 32: found.lengths[8]}), tmp_path)
    pages = [tmp_path / f"step-tiny{part}.md" for part in ("", "-configurations", "-curve")]
    assert text == "\n".join(page.read_text() for page in pages)
    assert "| **step, s** | 3.00 | 5.00 | 1.75x (1.50–2.00) | 3.00 | 5.00 | 1.75x (1.50–2.00) |" in pages[0].read_text()
    assert "| sync, s | 0.000 | 0.000 | – |" in text and "| peak memory, GB | 3.00 | 3.00 | 1.00x (1.00–1.00) |" in text
    assert "| **generate** | 4.00 | 2.00 | – |  |" in pages[1].read_text() and "| vLLM | – | – | – | TypeError: a / b |" in text
    assert "| TRL | 50.0% -> 100.0% | 25.0% -> 62.5% | 40.0% -> 60.0% |" in pages[2].read_text()
    for page in pages:  # docs/results.md takes in the first line of text and whatever begins with a bar, as one table
        lines = page.read_text().splitlines()
        assert len({line.count("|") for line in lines if line.startswith("|")}) == 1 and lines[2].startswith("a CPU, 2 cores; 2026-12-01")
    assert "a CPU, 2 cores; 2026-12-01; commit abc" in text and "trl 1.16.0" in text and "`python -m bench.step`" in text
    data = json.loads((tmp_path / "step-tiny.json").read_text())
    assert data["lengths"]["8"]["total"]["ratio"] == {"median": 1.75, "low": 1.5, "high": 2.0}
    assert data["lengths"]["8"]["sync"]["ratio"] is None and data["vllm_import_gb"] == 0.75 and data["date"] == "2026-12-01"


def test_nothing_measured_writes_nothing(tmp_path):
    with pytest.raises(ConfigError, match="nothing was measured"):
        tables.write(measured(lengths={}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_peer_that_cannot_be_installed_is_one_message(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FASTSCHED_CACHE", str(tmp_path))
    monkeypatch.setattr(peers, "installed_version", lambda package: None)
    noise = "WARNING: noise\nERROR: No matching distribution found for trl==1.16.0\n"
    monkeypatch.setattr(peers.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, "", noise))
    assert command.main(["--peer", "trl", "--model", "tiny"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "No matching distribution" in said.err and "pip install --no-deps trl==1.16.0" in said.err
    assert not list(tmp_path.glob("peers/trl-1.16.0"))


def test_a_peer_of_this_environment_is_taken_as_it_is_and_another_version_is_not(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTSCHED_CACHE", str(tmp_path))
    monkeypatch.setattr(peers, "installed_version", lambda package: "1.16.0")
    assert peers.peer_folder("trl") is None
    monkeypatch.setattr(peers, "installed_version", lambda package: "1.15.0")
    (tmp_path / "peers" / "trl-1.16.0").mkdir(parents=True)
    assert peers.peer_folder("trl") == tmp_path / "peers" / "trl-1.16.0"


def test_one_step_cannot_be_measured(monkeypatch, capsys):
    monkeypatch.setattr(command, "peer_folder", lambda peer: None)
    assert command.main(["--peer", "trl", "--model", "tiny", "--steps", "1"]) == 2
    assert "--steps" in capsys.readouterr().err


def test_both_models_are_configured_without_kl_entropy_and_schedules():
    for work in WORKLOADS.values():
        cfg = config(work, 8, 3, seed=5)
        assert cfg.learner.kl == "none" and cfg.scheduler.kind == "uniform" and cfg.learner.cooldown == 0 == cfg.learner.warmup_steps
        assert cfg.scheduler.entropy.ceiling == 0 == cfg.scheduler.kl.ceiling and cfg.skips_flat_groups
        assert (cfg.train.seed, cfg.rollout.max_new_tokens, cfg.rollout.responses) == (5, 8, 8) and cfg.data.prefill is None


def test_the_peer_is_given_the_prompts_that_a_run_draws_whatever_its_rewards_are():
    cfg = config(WORKLOADS["tiny"], 8, 3)
    prompts = SimpleNamespace(bins=np.arange(1000) % 4)
    scheduler, seen = Scheduler(cfg.scheduler, prompts.bins, cfg.train.prompts_per_step, 3, cfg.train.seed), []
    for step in range(3):
        chosen = scheduler.next_prompts()
        seen.append(chosen.rows.tolist())
        rewards = np.random.default_rng(step).integers(0, 2, (len(chosen.rows), 8)).astype(float)
        outcomes = Outcomes(chosen.rows, chosen.bins, rewards, np.ones(rewards.shape, int), np.zeros(rewards.shape, bool))
        scheduler.sampler.observe(outcomes, scheduler.success)
        scheduler.success = observe_success(scheduler.success, outcomes, cfg.scheduler)
    assert drawn_rows(cfg, prompts) == seen and len({tuple(rows) for rows in seen}) == 3


def test_a_run_that_drew_other_prompts_is_refused(tmp_path):
    row = {"step": 1, "t_rollout": 2.0, "t_reward": 0.5, "t_learn": 3.0, "t_sync": 0.25, "t_step": 6.0, "peak_mem_gb": 1.5,
           "reward_mean": 0.5, "response_len_mean": 8.0, "grad_norm": 1.0, "ratio_deviation": 0.01}
    (tmp_path / "metrics.csv").write_text(f"{','.join(row)}\n{','.join(map(str, row.values()))}\n")
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps({"step": 1, "row": r}) + "\n" for r in (7, 3)))
    step, = rounds.read_run(tmp_path, [[7, 3]])["steps"]
    assert step["sampling"] == 2.0 and step["other"] == 0.25 and step["total"] == sum(step[p] for p in pairs.PHASES[:-1])
    with pytest.raises(ConfigError, match="other prompts"):
        rounds.read_run(tmp_path, [[3, 7]])


def test_a_process_that_fails_is_named_with_its_last_line_and_one_that_finished_is_kept(tmp_path):
    bench = rounds.Bench("tiny", WORKLOADS["tiny"], tmp_path, None)
    with pytest.raises(rounds.Failed, match="trial-0 ended with code 1: .*No module named bench.nothing"):
        rounds.started(bench, "trial-0", ["bench.nothing"], None)
    rounds.keep(tmp_path / "a-ours.json", {"steps": [1]})
    assert rounds.run_ours(bench, "a-ours", 8, 3) == {"steps": [1]} and not list(tmp_path.glob("*.partial"))


def test_a_job_is_read_as_it_was_written(tmp_path):
    job = Job("folder", "exact_number", ["a"], ["1"], 1, 8, 16, 64, 3, 0, 1.0, 1e-3, [0.9, 0.999], 0.0, 1.0, [0.2, 0.28], {"parts": 1})
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job


@pytest.mark.parametrize(("deviation", "works"), [(None, True), (0.02, True), (0.5, False)])
def test_a_configuration_whose_sampler_missed_the_update_does_not_work(tmp_path, monkeypatch, deviation, works):
    asked = []

    def tried(bench, name, candidate, tokens, count, faster):
        asked.append((tokens, count, faster))
        return {"steps": [{**step, "deviation": deviation} for step in steps(9, 4)]}

    monkeypatch.setattr(command, "run_peer", tried)
    verdict = command.attempt(rounds.Bench("tiny", WORKLOADS["tiny"], tmp_path, None), "trial-0", {})
    assert asked == [(8, 2, 10.0)]
    if works:
        assert verdict == {"seconds": 4.0, "memory_gb": 2.0, "deviation": deviation}
    else:
        assert verdict == {"failed": "its sampler is 0.50 nats from its learner: it samples from other weights"}
