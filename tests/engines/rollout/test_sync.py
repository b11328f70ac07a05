"""A weight sync that did not happen is seen in its own step: one AdamW step at lr 1e-6 in bf16, in real engines with planted faults."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from rollout_worker import open_engine, prompt
from transformers import AutoModelForCausalLM

from fastsched.engines.models.tiny import random_tiny
from fastsched.engines.ranks import Ranks
from fastsched.engines.rollout.contract import RolloutEngine, require_weights
from fastsched.engines.rollout.fingerprints import differences, fingerprints, row_sums, scrambled, totals
from fastsched.engines.rollout.limits import LimitedRollout
from fastsched.engines.rollout.weights import SyncError
from fastsched.loop.sync import load_weights, require_weights_everywhere
from fastsched.types import Sampling

LR = 1e-6


class Setup(NamedTuple):
    kind: str
    engine: RolloutEngine
    before: dict[str, torch.Tensor]  # bf16
    after: dict[str, torch.Tensor]  # one step later


SERVER = pytest.param("vllm_server", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["vllm", "transformers", SERVER])
def opened(request, tmp_path_factory):
    folder = random_tiny(tmp_path_factory.mktemp(request.param), tied=True, seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(3)
    rounded = lambda: {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    before = rounded()
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0).step()
    engine = open_engine(request.param, folder, dtype="bfloat16", head_dtype="fp32")
    yield Setup(request.param, engine, before, rounded())
    engine.close()


@pytest.fixture
def setup(opened):
    """At the weights of before."""
    opened.engine.load_weights(opened.before.items(), 1)
    require_weights(opened.engine, fingerprints(opened.before.items(), torch.bfloat16), 1)
    return opened


class Planted:
    """The sampler, except that it takes over `stale` weights for those it is sent, or nothing at all."""

    def __init__(self, engine, stale: dict[str, torch.Tensor] | None):
        self.engine, self.stale = engine, stale
        self.dtype, self.fingerprints, self.weight_version = engine.dtype, engine.fingerprints, engine.weight_version

    def load_weights(self, named, version):
        if self.stale is not None:
            self.engine.load_weights(((name, self.stale.get(name, weight)) for name, weight in named), version)
        self.weight_version = version


def synced(engine, weights, version) -> None:
    require_weights_everywhere(Ranks(), engine, load_weights(engine, iter(weights.items()), version), version)


def test_the_head_of_a_bf16_sampler_may_be_fp32(setup):
    if setup.kind == "vllm_server":
        pytest.skip("test_server_parts.py has the server's options")
    engine = setup.engine
    dtype = (engine._model(input_ids=torch.tensor([[5, 6]])).logits.dtype if setup.kind == "transformers"
             else engine._llm.llm_engine.model_config.head_dtype)
    assert dtype is torch.float32 and engine.dtype is torch.bfloat16


def test_a_sync_that_happened_passes(setup):
    synced(setup.engine, setup.after, 2)
    assert setup.engine.weight_version == 2


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight",
                                  "model.layers.1.mlp.down_proj.weight"])
def test_a_sampler_that_ignores_one_tensor_is_seen(setup, name):
    changed = setup.before[name] != setup.after[name]
    assert 0 < changed.float().mean() < 0.2, "the step is as small as it is in a run"
    with pytest.raises(SyncError, match=rf"weight sync, version 2: .* does not hold .* differ, first {name}; .*--resume"):
        synced(Planted(setup.engine, {name: setup.before[name]}), setup.after, 2)


@pytest.mark.parametrize("ignores_all", [True, False])
def test_a_sampler_that_keeps_the_version_before_is_seen(setup, ignores_all):
    """It takes nothing, or loads what it was sent last time; either way it says that it is up to date."""
    with pytest.raises(SyncError, match="version 2: .* does not hold .* tensors differ, first model.embed_tokens.weight"):
        synced(Planted(setup.engine, None if ignores_all else setup.before), setup.after, 2)
    if ignores_all:
        setup.engine.load_weights(setup.after.items(), 2)  # and without the lie
        with pytest.raises(SyncError, match="version 3: the sampler says that its weights are version 2"):
            require_weights_everywhere(Ranks(), setup.engine, fingerprints(setup.after.items(), torch.bfloat16), 3)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.o_proj.weight"])
def test_a_tensor_that_vllm_drops_inside_is_seen(setup, name):
    """k_proj is part of a fused matrix, o_proj is one of its own: vLLM then keeps garbage, or what it had."""
    if setup.kind != "vllm":
        pytest.skip("reaches into vLLM in this process")

    def drop(model):
        load = model.load_weights
        model.load_weights = lambda weights: load((n, w) for n, w in weights if n != name)

    def mend(model):
        del model.load_weights

    setup.engine._llm.apply_model(drop)
    try:
        with pytest.raises(SyncError, match=f"1 of .* tensors differ, first {name}"):
            synced(setup.engine, setup.after, 2)
    finally:
        setup.engine._llm.apply_model(mend)


def test_prefixes_that_a_request_still_holds_stop_the_run(setup):
    if setup.kind != "vllm":
        pytest.skip("vLLM's cache; test_server_parts.py has the server's answer")
    from vllm import SamplingParams

    core = setup.engine._llm.llm_engine
    core.add_request("endless", {"prompt_token_ids": list(prompt(0, 40).token_ids)}, SamplingParams(max_tokens=100, detokenize=False))
    core.step()
    with pytest.raises(SyncError, match="sampler: vLLM refused to drop its prefix cache"):
        setup.engine.generate([prompt(0, 5)], Sampling(1, 2), [1])
    core.abort_request(["endless"])
    while core.has_unfinished_requests():
        core.step()
    assert len(setup.engine.generate([prompt(0, 5)], Sampling(1, 2), [1])) == 1


class Dies:
    weight_version, dtype = 2, torch.bfloat16

    def fingerprints(self):
        raise RuntimeError("planted: out of memory")


def test_a_sampler_that_dies_in_a_fingerprint_is_named():
    with pytest.raises(SyncError, match="version 2: whether .* cannot be told: .* fingerprints failed .RuntimeError: planted.*--resume"):
        require_weights_everywhere(Ranks(), LimitedRollout(Dies(), 600.0, print), {}, 2)


@dataclass(frozen=True)
class BesideAnother(Ranks):
    """Rank 0 of two, whose other rank says `theirs`."""

    theirs: str = ""

    def all_gather(self, value):
        return [value, self.theirs]


class Holds:
    """A sampler of one tensor."""

    weight_version, dtype = 2, torch.bfloat16

    def __init__(self, value: int):
        self.value = value

    def fingerprints(self):
        return {"the sampler": {"w": self.value}}


def test_two_ranks_stop_alike_whichever_of_them_failed():
    require_weights_everywhere(BesideAnother(world_size=2), Holds(5), {"w": 5}, 2)
    with pytest.raises(SyncError, match="^rank 1: planted; the learner"):
        require_weights_everywhere(BesideAnother(world_size=2, theirs="planted"), Holds(5), {"w": 5}, 2)
    with pytest.raises(SyncError, match="^rank 0: weight sync, version 2: .* 1 of 1 tensors differ, first w; the learner"):
        require_weights_everywhere(BesideAnother(world_size=2, theirs="planted"), Holds(6), {"w": 5}, 2)


def test_names_that_the_sampler_does_not_have_are_told_and_none_at_all_is_refused(caplog):
    require_weights(Holds(5), {"w": 5, "odd.weight": 7}, 2)
    assert "keeps 1 of 2 tensors in a form of its own, first odd.weight" in caplog.text
    with pytest.raises(SyncError, match="none of its tensors has a name that was sent"):
        require_weights(Holds(5), {"odd.weight": 7}, 2)


def test_all_ranks_gather_what_the_sampler_does_not_take():
    """Under ZeRO-3 the others would wait for ever."""
    gathered = []
    weights = ((gathered.append(name), (name, torch.ones(2)))[1] for name in "abc")
    assert load_weights(Planted(Holds(0), None), weights, 2).keys() == {"a", "b", "c"} and gathered == ["a", "b", "c"]


def fingerprint(tensor: torch.Tensor) -> int:
    return fingerprints([("", tensor)], tensor.dtype)[""]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(6, 16), (5, 7), (9,), (1, 3)])
def test_every_bit_of_every_element_counts(dtype, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits, size = torch.int32 if dtype is torch.float32 else torch.int16, 8 * weight.element_size()
    for place in range(weight.numel()):
        for bit in range(size):
            other = weight.clone()
            other.view(bits).view(-1)[place] ^= torch.tensor(1 << bit if bit < size - 1 else -(1 << bit), dtype=bits)
            assert fingerprint(other) != fingerprint(weight), (place, bit)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
def test_steps_of_one_unit_in_the_last_place_do_not_cancel(share):
    generator, prints = torch.Generator().manual_seed(0), set()
    weight = torch.randn(64, 96, generator=generator).bfloat16()
    for _ in range(500):
        up, moved = torch.randint(2, weight.shape, generator=generator), torch.rand(weight.shape, generator=generator) < share
        prints.add(fingerprint((weight.view(torch.int16) + (moved * (2 * up - 1)).short()).view(torch.bfloat16)))
    assert len(prints) == 500


@pytest.mark.parametrize("columns, cut", [(16, 8), (16, 5), (15, 7), (12, 4)])
def test_fused_sharded_and_padded_weights_add_up(columns, cut):
    whole = torch.randn(6, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    total = lambda sums: scrambled(sums).sum().item()
    assert fingerprint(whole) == total(torch.cat([row_sums(whole[4:]), row_sums(whole[:4])]))
    assert fingerprint(whole) == total(row_sums(whole[:, :cut]) + row_sums(whole[:, cut:], cut))
    assert fingerprint(whole) == fingerprint(torch.cat([whole, torch.zeros(2, columns).bfloat16()]))
    swapped = whole.clone()
    swapped[0, 0], swapped[0, 1] = whole[0, 1], whole[0, 0]
    assert fingerprint(swapped) != fingerprint(whole)


def test_fingerprints_of_many_tensors_are_those_of_each():
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((5, 8), (0, 8), (7,), (3, 2, 4))]
    assert totals([row_sums(t) for t in tensors]).tolist() == [scrambled(row_sums(t)).sum().item() for t in tensors]
    assert totals([]).tolist() == []


def test_a_tied_head_must_be_one_of_the_tensors_that_were_sent():
    sent = {"embed": 1, "norm": 2}
    assert differences(sent, {"embed": 1, "norm": 2, "lm_head.weight": 1, "scale": 9}) == []
    assert differences(sent, {"embed": 1, "norm": None, "lm_head.weight": 3}) == ["norm", "lm_head.weight"]
