"""What the tiny model is warm-started on follows the task."""

import numpy as np
import pytest

from fastsched.config.arguments import parse_config, preset_path
from fastsched.data.chain import chain_held_out, chain_rows
from fastsched.data.tasks import Form, arithmetic_rows
from fastsched.engines.models import tiny
from fastsched.engines.models.loading import load_policy
from fastsched.engines.models.tiny import recipe
from fastsched.loop import prepare


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


@pytest.mark.slow
def test_the_warm_start_on_chains_leaves_room():
    """Sampled accuracy of the cached model of chain-tiny on held-out problems: most of the easy ones, few of the hardest."""
    cfg = parse_config(["--config", str(preset_path("chain-tiny"))])
    model = load_policy(prepare.prepare_model(cfg), cfg.model).eval()
    table = chain_held_out(64, cfg.data.chain_steps, Form(negative=False))
    rows = np.array(listed(table), dtype=object)
    accuracy = [tiny.expected_accuracy(model, tiny.encode(tiny.tiny_tokenizer(), rows[table.bin == b].tolist())) for b in range(4)]
    assert 0.6 < accuracy[0] < 0.9 and accuracy[3] < 0.35 and accuracy[3] < accuracy[2] < accuracy[0], accuracy
