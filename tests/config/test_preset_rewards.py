"""Every preset rewards what its prompt asks for: the right answer in the form asked for, and not the length of another form."""

import json

import pytest

from fastsched.config import Config
from fastsched.config.arguments import parse_config, preset_names, preset_path
from fastsched.data.scorers import load_scorer
from fastsched.data.tasks import arithmetic_rows, reasoning_gym_rows

ASKED_BY = {"boxed": "\\boxed{}", "answer_tag": "<answer>"}
IN_FORM = {"none": "the answer is {}", "boxed": "so it is \\boxed{{{}}}", "answer_tag": "thus <answer>{}</answer>"}
LENGTHS = ["{}", "It is {}.", "First I add the numbers one by one, and then I look at the sign. " * 20 + "It is {}."]


def config(name) -> Config:
    return parse_config(["--config", str(preset_path(name))])


def form_of(cfg: Config) -> str:
    """The form that the reward reads."""
    reads = {"task": "answer_tag", "math_verify": "boxed"}.get(cfg.reward.kind, "none")
    return cfg.reward.require if cfg.reward.require != "none" else reads


@pytest.fixture(params=preset_names())
def preset(request):
    """(configuration, score of a response, right answer, wrong answer)."""
    cfg, meta = config(request.param), {}
    if cfg.data.task.startswith("reasoning-gym:"):
        rows = reasoning_gym_rows(cfg.data.task.removeprefix("reasoning-gym:"), 1, seed=0)
        answer, meta = rows.answer[0], json.loads(rows.meta[0])
    else:
        answer = arithmetic_rows(1).answer[0] if cfg.data.task in ("arithmetic", "chain") else "17"
    scorer = load_scorer(cfg.reward.kind, cfg.data.task, cfg.reward.require)
    return cfg, lambda response: scorer(prompt="", response=response, answer=answer, meta=meta), answer, str(int(answer) + 1)


def test_the_prompt_asks_for_the_form_that_the_reward_reads(preset):
    cfg, *_ = preset
    form = form_of(cfg)
    assert form == "none" or ASKED_BY[form] in cfg.data.system_prompt and cfg.reward.require == form


def test_the_right_answer_in_that_form_scores_1_and_a_wrong_one_0(preset):
    cfg, score, right, wrong = preset
    asked = IN_FORM[form_of(cfg)]
    assert [score(asked.format(answer)) for answer in (right, wrong)] == [1.0, 0.0]


def test_without_the_form_length_does_not_matter(preset):
    cfg, score, right, _ = preset
    assert {score(text.format(right)) for text in LENGTHS} == {1.0 if form_of(cfg) == "none" else 0.0}
