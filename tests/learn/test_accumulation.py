"""Gradients of a bf16 model added up over hundreds of micro-batches, under every ZeRO stage that takes bf16."""

import pytest
import torch
from small_bf16 import backward, error, length, micro_batches, small_engine, sums

N = 512


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("alike", [True, False], ids=["coherent", "random"])
def test_hundreds_of_micro_batches_add_up(model_path, stage, alike):
    found = sums(stage, micro_batches(1) * N if alike else micro_batches(N))
    true = length(found.truth.values())
    assert error(found) < 1e-3 and found.norm == pytest.approx(true, rel=1e-3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_sum_is_clipped_as_a_whole(model_path, stage):
    found = sums(stage, micro_batches(4), grad_clip=0.25)
    true = length(found.truth.values())
    assert found.norm == pytest.approx(true, rel=1e-5) and true > 0.5
    assert length(found.used[name] - g * 0.25 / true for name, g in found.truth.items()) < 1e-4 * 0.25


@pytest.mark.parametrize("written, read", [(1, 1), (1, 2), (2, 1), (3, 1), (1, 3)])
def test_a_checkpoint_of_any_stage_goes_on_under_any_other(model_path, tmp_path, written, read):
    """Stage 1 wrote its shards as stage 2 does before bf16 was summed in fp32: those checkpoints are read as well."""
    micro = micro_batches(8)

    def train(engine, updates):
        for _ in range(updates):
            backward(engine, micro)
            engine.step(1e-3)
            engine.update_average(0.5)

    def tensors(engine):
        return {**{n: w.clone() for n, w in engine.named_weights()}, **{f"average.{n}": w.clone() for n, w in engine.average_weights()}}

    first = small_engine(written)
    train(first, 3)
    first.save(tmp_path)
    saved = tensors(first)
    train(first, 2)
    straight = tensors(first)
    first.close()
    second = small_engine(read)
    second.load(tmp_path)
    loaded = tensors(second)
    train(second, 2)
    after = tensors(second)
    second.close()
    assert all(torch.equal(saved[n], loaded[n]) for n in saved) and not all(torch.equal(saved[n], straight[n]) for n in saved)
    assert all(torch.equal(straight[n], after[n]) for n in straight)


def test_no_program_is_started_to_count_devices(model_path, monkeypatch):
    """The fault: under ZeRO-3 every bucket of gradients asked `numactl --hardware`, some 20 ms a micro-batch."""
    asked = []
    monkeypatch.setattr("deepspeed.utils.numa.get_numa_cores", lambda: asked.append(1) or [[0]])
    engine = small_engine(3)
    asked.clear()
    backward(engine, micro_batches(2))
    engine.step(1e-3)
    engine.close()
    assert not asked
