"""The memory estimate of --dry-run against what runs measure. tests/commands/test_dry_run.py has its parts."""

import csv
from dataclasses import replace

import pytest

from fastsched.commands.memory import estimate_memory
from fastsched.config import ModelShape
from fastsched.config.arguments import parse_config, preset_path
from fastsched.engines.models.shape import folder_shape
from fastsched.loop.prepare import prepare_model

TOLERANCE = 0.15
STEPS = ("--train.steps", "3", "--log.plots", "false", "--train.eval_at_ends", "false")
QWEN3_4B = ModelShape(4.02e9, 36, 2560, 151936, 1024)


def config(*options: str):
    return parse_config(["--config", str(preset_path("tiny-cpu")), *options])


def measured(run_dir) -> float:
    """Bytes, the peak of rank 0's process."""
    with (run_dir / "metrics.csv").open() as file:
        return float(list(csv.DictReader(file))[-1]["peak_mem_gb"]) * 1e9


@pytest.mark.parametrize("ranks, stage", [(1, 1), *(pytest.param(ranks, stage, marks=pytest.mark.slow)
                                                    for ranks, stage in ((1, 2), (1, 3), (2, 1), (2, 2), (2, 3)))])
def test_a_run_takes_what_the_dry_run_says(fastsched, tmp_path, ranks, stage):
    options = ("--learner.zero_stage", str(stage), *STEPS)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m", "fastsched.cli") if ranks > 1 else ()
    done = fastsched("train", "--preset", "tiny-cpu", *options, "--run_dir", str(tmp_path / "run"), process=True, launcher=launcher,
                     OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    cfg = config(*options)
    estimate = estimate_memory(cfg, folder_shape(prepare_model(cfg), cfg.model), ranks).resident
    assert estimate == pytest.approx(measured(tmp_path / "run"), rel=TOLERANCE)


def parts(*options: str, shape: ModelShape = QWEN3_4B, world: int = 1) -> dict[str, float]:
    estimate = estimate_memory(config(*options), shape, world)
    return {**estimate.held, **estimate.on_a_cpu}


def test_zero_stages_divide_what_they_partition():
    one, two = ([parts("--learner.zero_stage", str(stage), world=world) for stage in (1, 2, 3)] for world in (1, 2))
    divided = [{name for name in alone if shared[name] == alone[name] / 2} for alone, shared in zip(one, two, strict=True)]
    optimizer = {"master weights and Adam", "averaged policy"}
    assert divided == [optimizer, optimizer | {"gradients"}, optimizer | {"gradients", "working weights", "reference"}]
    assert all(shared[name] == alone[name] for alone, shared in zip(one, two, strict=True) for name in ("activations", "sampler weights"))


def test_what_a_run_does_not_have_takes_nothing():
    no_kl = [f"--scheduler.kl.{edge}=0" for edge in ("start", "floor", "ceiling")]
    assert "reference" not in parts("--learner.kl", "none", *no_kl) and "gradient sums by bin" not in parts()
    assert parts("--model.gradient_checkpointing", "true")["activations"] < 0.1 * parts()["activations"]
    assert "masks" not in parts("--model.dtype", "bfloat16", "--model.attention", "flash_attention_2", "--learner.share_prompts", "false")
    served = parts("--rollout.engine", "vllm_server")
    assert "sampler weights" not in served and "sampler cache" not in served and "sampler weights" in parts()


def test_masks_grow_with_the_widest_row():
    """Sharing prompts makes rows as wide as a group; 28 x 142 MB of them went uncounted."""
    short, long = (parts("--rollout.max_new_tokens", str(n), "--learner.micro_batch_tokens", "8440")["masks"] for n in (8, 8192))
    assert long == 8440 * 8440 * 5 and short < long / 50  # fp32: 4 bytes, and 1 while it is made


def test_activations_follow_the_mlp():
    narrow, wide = (parts(shape=replace(QWEN3_4B, parameters=n))["activations"] for n in (3e9, 6e9))
    assert wide > 1.5 * narrow
