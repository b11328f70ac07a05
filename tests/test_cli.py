"""The command line as a user meets it: one clear message, the right exit code."""

import json

import pytest

from fastsched.arguments import changed_keys, config_to_yaml, parse_config, preset_names, preset_path
from fastsched.cli import main
from fastsched.config import Config, ConfigError


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


def test_help_explains_every_key(capsys):
    assert main(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--scheduler.window" in text and "Band in which mean success is held." in text


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
                           (["--model.attention", "flash_attention_2"], "learner.share_prompts")):
        with pytest.raises(ConfigError, match=key):
            parse_config(arguments)


def test_presets_command_lists_them(capsys):
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("smollm2-cpu", "tiny-cpu", "qwen3-0.6b-gpu", "qwen3-4b-8xh200"))


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
