"""What of `reward` is refused, and how several rewards are named."""

import pytest

from fastsched.config import ConfigError, RewardConfig, RewardPart
from fastsched.config.arguments import config_to_yaml, parse_config


def extra(text):
    return parse_config(["--reward.extra", text])


def test_further_rewards_on_the_command_line_and_in_a_file(tmp_path):
    cfg = extra("[{kind: 'mine:short', weight: 0.2}, {kind: graded_number, name: digits, require: boxed}]")
    assert cfg.reward.extra == (RewardPart("mine:short", 0.2), RewardPart("graded_number", 1.0, "digits", "boxed"))
    assert [part.label for part in cfg.reward.parts] == ["exact_number", "short", "digits"]
    (tmp_path / "c.yaml").write_text(config_to_yaml(cfg))
    assert parse_config(["--config", str(tmp_path / "c.yaml")]) == cfg


def test_the_single_form_is_one_part():
    assert RewardConfig(kind="math_verify", require="boxed").parts == (RewardPart("math_verify", 1.0, "", "boxed"),)


@pytest.mark.parametrize("text, cause", [
    ("[{kind: nope}]", r"reward.extra\[0\].kind: 'nope' is none of"),
    ("[{kind: graded_number}, {kind: 'm:f', weight: .inf}]", r"reward.extra\[1\].weight: inf"),
    ("[{kind: exact_number}]", "reward_exact_number, because two rewards have that name"),
    ("[{kind: 'm:mean'}]", "reward_mean, because that is another column's name"),
    ("[{kind: 'm:f', name: 'a b'}]", "reward_a b, because names are of letters"),
    ("[{kind: 'm:f', wieght: 1}]", "unknown key wieght"),
    ("[{weight: 1}]", "kind"),
])
def test_what_cannot_be_a_part(text, cause):
    with pytest.raises(ConfigError, match=cause):
        extra(text)


@pytest.mark.parametrize("options", [["--reward.kind", "task"], ["--reward.extra", "[{kind: task}]"]])
def test_the_tasks_own_verifier_needs_such_a_task(options):
    with pytest.raises(ConfigError, match="reward.kind.*reasoning-gym:NAME.*'arithmetic'"):
        parse_config(options)
    assert parse_config([*options, "--data.task", "reasoning-gym:chain_sum"])


def test_a_reward_that_reads_the_prefill_needs_one():
    with pytest.raises(ConfigError, match="reward.prefill: no answer begins"):
        parse_config(["--reward.prefill", "true"])
    assert parse_config(["--reward.prefill", "true", "--data.prefill", "{problem} = "]).reward.prefill
    assert parse_config(["--reward.prefill", "true", "--data.task", "dataset", "--data.source", "x.jsonl"]).reward.prefill
