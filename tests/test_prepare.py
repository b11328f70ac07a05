"""What the tiny model is warm-started on follows the task."""

import pytest

from fastsched import prepare
from fastsched.arguments import parse_config, preset_path
from fastsched.data.chain import chain_rows
from fastsched.data.tasks import Form, arithmetic_rows
from fastsched.engines.tiny import recipe


@pytest.fixture
def rows_of(monkeypatch):
    """The warm-start rows that a configuration hands to the model's maker."""
    monkeypatch.setattr(prepare, "resolve_model", lambda cfg, warm_start_rows: warm_start_rows)
    return lambda preset, *options: prepare.prepare_model(parse_config(["--config", str(preset_path(preset)), *options]))


def listed(table):
    return list(zip(table.prompt, table.answer, table.bin.tolist(), strict=True))


def test_rows_are_those_of_the_task(rows_of):
    assert rows_of("tiny-cpu") == listed(arithmetic_rows(prepare.WARM_START_ROWS))
    assert rows_of("chain-tiny") == listed(chain_rows(prepare.WARM_START_ROWS, (5, 6, 8, 9), Form(negative=False)))
    assert rows_of("smollm2-cpu") is None


def test_what_changes_the_task_changes_the_recipe_and_what_does_not_keeps_it(rows_of):
    def of(*arguments):
        return recipe(rows_of(*arguments), 0.7)

    recipes = {of("chain-tiny"), of("tiny-cpu"), of("chain-tiny", "--data.chain_steps", "5", "6"),
               of("chain-tiny", "--data.negative", "true")}
    assert len(recipes) == 4
    assert of("tiny-cpu") == of("tiny-cpu", "--data.chain_steps", "2", "3") == of("scheduler-student-tiny")
