"""What README, CONTRIBUTING and docs/ show is true: commands run or parse, keys, files, modules and links exist, generated parts are fresh.

A command that trains is run with --dry-run, in this process. `documents_check` holds how each kind of command is checked.
"""

import ast
import json
import re
import shutil

import numpy as np
import pytest
import yaml
from command_line import ROOT
from documents_check import check_command, commands, keys, links, missing_key, missing_link, missing_path, pages, python_blocks, yaml_blocks

from bench.documents import metrics_page, with_results
from fastsched import groups
from fastsched.config import SchedulerConfig
from fastsched.config import samplers as declared
from fastsched.config.arguments import parse_config
from fastsched.control.samplers import prompts, table
from fastsched.control.window import unknown_success
from fastsched.learn.losses import LOSSES
from fastsched.types import Outcomes

PAGES = pages()
COMMANDS = sorted({command for page in PAGES for command in commands(page.read_text())})
named = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


@pytest.fixture
def workplace(tmp_path, monkeypatch, random_model):
    """A folder in which every command of the pages finds what it names; no hub. Returns the model that stands for MODEL."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTSCHED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    rows = ('{"question": "What is 1 + %d?", "answer": "%d", "level": %d}' % (i, i + 1, i) for i in range(400))
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    model = tmp_path / "model"
    shutil.copytree(random_model, model)
    description = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(description | {"max_position_embeddings": 8192}))
    return model


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_as_shown(command, workplace, capsys):
    check_command(command, workplace, capsys)


@pytest.mark.parametrize("command, complaint", [
    ("fastsched train --preset tiny-cpu --scheduler.knid fixed", "unknown option --scheduler.knid; did you mean scheduler.kind"),
    ("fastsched train --preset tiny-cpu --scheduler.kind sloppy", "sloppy"),
    ("fastsched train --preset huge-cpu", "no preset 'huge-cpu'"),
    ("fastsched cluster --preset ads-tiny --features.klusters 3", "unknown option --features.klusters"),
    ("fastsched eval runs/first --beste", "--beste"),
    ("fastsched evaluate runs/first", "usage: fastsched"),
    ("deepspeed --num_gpus 2 --module fastsched.cli train --preset tiny-cpu --learner.zerro 3", "unknown option --learner.zerro"),
    ("python -m bench.learning.simplers", "no module bench.learning.simplers"),
    ("python -m bench.learning.samplers --preset tiny-cpu --sseeds 3", "--sseeds"),
    ("python -m bench.learning.samplers --preset tiny-cpu --train.stteps 3", "train.stteps"),
    ("make tea", "no target tea"),
    ("pytest tests/test_nothing.py", "tests/test_nothing.py"),
    ("SMALL=1 bench/device/nothing.sh", "bench/device/nothing.sh"),
    ("pip install '.[tpu]'", "no extra tpu"),
    ("dance --wildly", "nobody checks"),
])
def test_a_command_that_cannot_work_is_found(command, complaint, workplace, capsys):
    with pytest.raises(AssertionError, match=re.escape(complaint)):
        check_command(command, workplace, capsys)


def test_every_kind_of_command_is_collected():
    text = ("Run `fastsched presets` and `make docs`, not `fastsched` or `config.yaml`.\n\n"
            "```bash\nmake test  # all\nfastsched eval \\\n    runs/x\n```\n\n```python\nmake = 1\n```\n")
    assert commands(text) == ["make test", "fastsched eval runs/x", "fastsched presets", "make docs"]
    assert any(c.startswith("torchrun") for c in COMMANDS) and any(c.startswith("pytest") for c in COMMANDS)


@named
def test_keys_files_and_modules_that_a_page_names_exist(page):
    assert [key for key in keys(page.read_text()) if missing_key(key)] == []
    assert missing_path(page) == []


def test_a_key_or_file_that_does_not_exist_is_found(tmp_path):
    text = ("`rollout.ahed`, `--learner.los gspo`, `scheduler.ads` and `scheduler.ads.size`, `train.py`, `scheduler.observe(x)`\n"
            "`fastsched/nothing.py`, `fastsched/train.py`, `nothing.py`, `bench.nothing`, `fastsched_kernels.linear.policy_loss`")
    assert [key for key in keys(text) if missing_key(key)] == ["rollout.ahed", "learner.los"]
    (tmp_path / "page.md").write_text(text)
    assert missing_path(tmp_path / "page.md") == ["fastsched/nothing.py", "nothing.py", "bench.nothing"]


@named
def test_links_lead_somewhere(page):
    assert [link for link in links(page.read_text()) if missing_link(page, link)] == []


def test_a_link_that_leads_nowhere_is_found():
    wrong = ["docs/nothing.md", "docs/results.md#nothing", "#nothing"]
    assert [link for link in [*wrong, "docs/results.md#faults", "#limits"] if missing_link(ROOT / "README.md", link)] == wrong


@named
def test_code_blocks_run_and_settings_parse(page, tmp_path):
    """A Python block that imports something stands on its own and is run; the others are excerpts."""
    for number, block in enumerate(python_blocks(page.read_text())):
        tree = ast.parse(block)
        if any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in tree.body):
            exec(compile(tree, f"{page.name}, block {number}", "exec"), {})
    for block in yaml_blocks(page.read_text()):
        (tmp_path / "settings.yaml").write_text(block)
        assert yaml.safe_load(block) and parse_config(["--config", str(tmp_path / "settings.yaml")])


@named
def test_a_fence_names_its_language(page):
    opened = re.findall(r"^```(\w*)$", page.read_text(), re.MULTILINE)[::2]
    assert set(opened) <= {"bash", "python", "yaml", "text", "diff"}


def test_the_sampler_that_contributing_adds_is_one(monkeypatch):
    """It draws distinct rows, half of them unsolved before, and resumes bit for bit."""
    new_file, *lines = re.search(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[1].split("+++ fastsched/")[1:]
    names = {**vars(prompts), "successes_by_row": groups.successes_by_row, "Traits": declared.Traits}
    exec("\n".join(line.removeprefix("+") for line in new_file.splitlines()[1:]), names)
    for module, line in zip((table.CLASSES, declared.SAMPLERS), lines, strict=True):
        for name, value in eval("{" + line.splitlines()[1].removeprefix("+") + "}", names).items():
            monkeypatch.setitem(module, name, value)
    one, other = (table.make_sampler(SchedulerConfig(kind="unsolved"), np.zeros(40, np.uint16), np.array([40]), 8, 0) for _ in range(2))
    success, first = unknown_success(1, 0.5), one.draw(8, unknown_success(1, 0.5))
    rewards = np.repeat(np.arange(8)[:, None] < 4, 2, axis=1).astype(float)
    one.observe(Outcomes(first.rows, first.bins, rewards, np.ones((8, 2), int), np.zeros((8, 2), bool)), success)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    second = one.draw(8, success).rows
    assert len(set(second.tolist())) == 8 and set(first.rows[4:]) <= set(second.tolist())
    assert second.tolist() == other.draw(8, success).rows.tolist()


def test_the_losses_of_the_page_are_those_of_the_table():
    page = (ROOT / "docs/objectives.md").read_text()
    rows = re.findall(r"^\| `(\w+)`.*\| ([^|]+) \|$", page[page.index("## Losses"):page.index("### Distillation")], re.MULTILINE)
    clips = {name: tuple(float(x) for x in re.findall(r"\d[\d.e-]*", clip)) or None for name, clip in rows}
    assert clips == {name: loss.clip for name, loss in LOSSES.items()}


def test_generated_parts_are_fresh():
    """`make docs` writes them."""
    assert (ROOT / "docs/metrics.md").read_text() == metrics_page()
    for page in PAGES:
        assert with_results(page.read_text()) == page.read_text(), f"{page.name}: run make docs"


def test_a_stale_table_is_found():
    page = with_results("x\n<!-- bench/results/faults.md -->\nof yesterday\n<!-- end -->\n")
    assert "| fault |" in page and "of yesterday" not in page


@pytest.mark.parametrize("page, lines, size", [("README.md", 120, 7168), ("CONTRIBUTING.md", 110, 7168)])
def test_the_first_pages_stay_short(page, lines, size):
    text = (ROOT / page).read_bytes()
    assert text.count(b"\n") <= lines and len(text) <= size
