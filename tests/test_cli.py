"""The command line as a user meets it: one clear message, the right exit code."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from command_line import ROOT

from fastsched.cli import main
from fastsched.commands.evaluate import in_one_process
from fastsched.config import Config, ConfigError, RolloutConfig
from fastsched.config.arguments import changed_keys, config_to_yaml, parse_config, preset_names, preset_path


def fails(capsys, *arguments):
    assert main(list(arguments)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("fastsched: "), lines
    return lines[0]


@pytest.mark.parametrize("arguments, words", [
    (["--learner.lrr", "1"], ["unknown option --learner.lrr", "did you mean learner.lr?"]),
    (["--learnr.lr", "1"], ["did you mean learner.lr?"]),
    (["--learner.lr", "fast"], ["learner.lr", "float", "fast"]),
    (["--learner.zero_stage", "4"], ["learner.zero_stage", "4"]),
    (["--scheduler.window", "0.6", "0.4"], ["scheduler.window", "low < high"]),
    (["--preset", "tiny"], ["no preset 'tiny'", "did you mean tiny-cpu?"]),
    (["--preset", "tiny-cpu", "--config", "x.yaml"], ["exclude each other"]),
    (["--config", "missing.yaml"], ["missing.yaml"]),
    (["--reward.kind", "exact"], ["reward.kind", "exact_number"]),
    (["--resume", "--run_dir", "runs/none-here"], ["runs/none-here"]),
])
def test_bad_arguments(capsys, arguments, words):
    message = fails(capsys, "train", *arguments)
    assert all(word in message for word in words), message


def test_unknown_key_in_yaml(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("scheduler: {windw: [0.4, 0.6]}")
    assert "unknown key scheduler.windw; did you mean scheduler.window?" in fails(capsys, "train", "--config", str(tmp_path / "c.yaml"))
    (tmp_path / "c.yaml").write_text("schedule: {window: [0.4, 0.6]}")
    assert "did you mean scheduler" in fails(capsys, "train", "--config", str(tmp_path / "c.yaml"))


def test_unknown_command_is_usage(capsys):
    assert main(["trian"]) == 2 and "train" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0


@pytest.mark.parametrize("name", preset_names())
def test_presets_parse_and_round_trip_through_yaml(tmp_path, name):
    cfg = parse_config(["--config", str(preset_path(name))])
    (tmp_path / "again.yaml").write_text(config_to_yaml(cfg))
    again = parse_config(["--config", str(tmp_path / "again.yaml")])
    assert again == cfg and not changed_keys(cfg, again)
    assert changed_keys(cfg, Config()) and preset_path(name).read_text().startswith("# ")


def test_overrides_win_over_the_file(tmp_path):
    (tmp_path / "c.yaml").write_text("learner: {lr: 1.0e-3}\ntrain: {steps: 7}")
    cfg = parse_config(["--config", str(tmp_path / "c.yaml"), "--learner.lr", "2e-3", "--scheduler.window", "0.35", "0.65"])
    assert (cfg.learner.lr, cfg.train.steps, cfg.scheduler.window) == (2e-3, 7, (0.35, 0.65))


def test_combinations_that_cannot_work_are_refused():
    for arguments, key in ((["--learner.kl", "none", "--scheduler.kl.ceiling", "0.1"], "learner.kl"),
                           (["--rollout.correction", "token_tis", "--rollout.top_p", "0.9"], "rollout.correction"),
                           (["--learner.zero_stage", "0", "--model.dtype", "bfloat16"], "learner.zero_stage"),
                           (["--rollout.ahead", "1"], "rollout.ahead: needs rollout.engine vllm_server; vllm samples in the learner's own"),
                           (["--rollout.engine", "vllm_server", "--rollout.ahead", "1", "--scheduler.refills", "1"], "rollout.ahead"),
                           (["--rollout.servers", "http://127.0.0.1:1"], "rollout.servers"),
                           (["--rollout.replicas", "2"], "rollout.replicas"),
                           (["--rollout.engine", "vllm_server", "--rollout.tensor_parallel", "2"], "rollout.tensor_parallel"),
                           (["--rollout.engine", "transformers", "--rollout.sleep", "true"], "rollout.sleep"),
                           (["--rollout.engine", "vllm_server", "--rollout.timeout_s", "0"], "time limits"),
                           (["--model.attention", "flash_attention_2"], "model.attention: flash_attention_2 computes in bf16 only"),
                           (["--model.attention", "flash_attention_2", "--model.dtype", "bfloat16"], "learner.share_prompts")):
        with pytest.raises(ConfigError, match=key):
            parse_config(arguments)


def test_eval_and_export_leave_launcher_and_running_servers_alone():
    """A server in the configuration holds the weights of whoever trains with it, not those of the checkpoint."""
    training = [RolloutConfig(engine="vllm_server", servers=("http://127.0.0.1:1",), ahead=1), RolloutConfig(tensor_parallel=2, sleep=True)]
    assert [in_one_process(cfg) for cfg in training] == [RolloutConfig(engine="vllm_server"), RolloutConfig()]


def test_presets_command_lists_them(capsys):
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("smollm2-cpu", "tiny-cpu", "qwen3-0.6b-gpu", "qwen3-4b-8xh200"))


@pytest.mark.parametrize("command", ["presets", "train --help", "cluster --help"])
def test_a_reader_that_has_seen_enough_is_no_error(command):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "fastsched.cli", *command.split()], stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_dry_run_counts_what_the_objective_holds(capsys, random_model):
    base = ["train", "--dry-run", "--model.name", str(random_model), "--data.size", "200", "--data.eval_per_bin", "2"]
    assert main(base) == 0
    assert "teacher" not in capsys.readouterr().out.split("memory on each")[1]
    assert main([*base, "--learner.loss", "opd", "--learner.teacher", "other", "--learner.kl", "none", "--log.snr_bins", "true"]) == 0
    memory = capsys.readouterr().out.split("memory on each")[1]
    assert "teacher, if of this size" in memory and "gradient sums by bin" in memory


def test_dry_run_says_where_more_is_sampled_than_trained(capsys, random_model):
    base = ["train", "--dry-run", "--model.name", str(random_model), "--data.size", "200", "--data.eval_per_bin", "2",
            "--train.prompts_per_step", "8", "--rollout.responses", "8", "--learner.kl", "none"]
    assert main(base) == 0 and "sampled" not in capsys.readouterr().out.split("\nbatch:")[1]
    assert main([*base, "--scheduler.refills", "2"]) == 0 and "up to 192 are sampled a step" in capsys.readouterr().out
    assert main([*base, "--scheduler.kind", "dots", "--scheduler.dots.replay", "0.25"]) == 0
    assert "48 of a step are sampled once the replay buffer gives the rest" in capsys.readouterr().out
    assert main([*base, "--scheduler.kind", "speed"]) == 0 and "screening samples up to 160 in one generation" in capsys.readouterr().out


def test_dry_run_checks_the_whole_dataset(capsys, tmp_path, random_model):
    def dry(rows, *more):
        (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
        return ["train", "--dry-run", "--model.name", str(random_model), "--data.task", "dataset",
                "--data.source", str(tmp_path / "data.jsonl"), "--data.eval_per_bin", "2", "--train.prompts_per_step", "4", *more]

    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(40)]
    assert main(dry(rows)) == 0
    assert "38 training prompts" in capsys.readouterr().out
    rows[17]["prompt"] = "word " * 10_000
    message = fails(capsys, *dry(rows))
    assert "row 17" in message and "data.max_prompt_tokens" in message and "data.overlong drop" in message
    assert main(dry(rows, "--data.overlong", "drop")) == 0
    assert "dropped 1 rows" in capsys.readouterr().out
    assert "train.prompts_per_step" in fails(capsys, *dry(rows[:5]))
    assert "learner.micro_batch_tokens" in fails(capsys, *dry(rows[:16], "--learner.micro_batch_tokens", "64"))


def test_g6_a_batch_that_ranks_cannot_share_names_the_multiple(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)  # an engine in this process sets it
    message = fails(capsys, "train", "--preset", "tiny-cpu", "--train.ranks", "3", "--dry-run")
    assert "train.prompts_per_step: 32 prompts cannot be split over 3 ranks; use a multiple of 3" in message


def test_b6_defaults_add_nothing_to_the_objective():
    """No entropy bonus and no KL term that nobody asked for, every token trained, no correction."""
    from fastsched.control.scheduler import Scheduler

    cfg = Config()
    knobs = Scheduler(cfg.scheduler, np.zeros(64, np.int64), 8, 10, seed=0).knobs()
    assert (knobs.entropy_coef, knobs.kl_coef, knobs.temporal_s, knobs.lr_scale) == (0, 0, 0, 1)
    assert cfg.rollout.correction == "none" and cfg.learner.dual_clip is None and cfg.learner.weight_decay == 0
