"""Models with dropout: policy, reference and teacher are one network where their weights are."""

from dataclasses import replace

import pytest
import torch
from test_learner import BASE, KNOBS, MODEL, G, batch
from transformers import AutoModelForCausalLM, GPT2Config, OPTConfig

from fastsched.config import Config, RolloutConfig
from fastsched.engines.learner.deepspeed_engine import DeepSpeedLearner
from fastsched.learn.learner import Learner

DROPPING = {
    "gpt2": GPT2Config(vocab_size=320, n_positions=64, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1),
    "opt": OPTConfig(vocab_size=320, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=32,
                     max_position_embeddings=64, dropout=0.1, attention_dropout=0.1, layerdrop=0.5),
}


def first_step(name, tmp_path, checkpointing=False, teacher=False):
    """(statistics of the first update, how often the first attention ran for each micro-batch)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DROPPING[name], attn_implementation="sdpa").train()
    cfg = replace(BASE, loss="opd", kl="none", teacher="same") if teacher else BASE
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls, micro_batches = [], []
    attention = next(m for n, m in model.named_modules() if n.endswith(("attn", "self_attn")))
    other = AutoModelForCausalLM.from_config(DROPPING[name], attn_implementation="sdpa").train() if teacher else None
    if teacher:
        other.load_state_dict(model.state_dict())
    engine = DeepSpeedLearner(model, cfg, MODEL, other)
    attention.register_forward_hook(lambda *_: calls.append(1))
    backward = engine.backward
    engine.backward = lambda micro, loss, *, reference: (micro_batches.append(1), backward(micro, loss, reference=reference))[1]
    learner = Learner(engine, Config(model=MODEL, learner=cfg, rollout=RolloutConfig(responses=G, max_new_tokens=8)), tmp_path)
    stats = learner.update(*batch(1), replace(KNOBS, kl_coef=0.0) if teacher else KNOBS, 1)
    engine.close()
    return stats, len(calls) / len(micro_batches)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", DROPPING)
def test_the_first_step_finds_no_kl_to_itself(model_path, tmp_path, name, checkpointing):
    stats, forwards = first_step(name, tmp_path, checkpointing)
    assert stats.kl == 0 and stats.grad_norm > 0
    assert forwards == (2 if checkpointing else 1)  # activations are still computed anew in backward where that was asked for


def test_a_teacher_of_the_same_weights_teaches_nothing(model_path, tmp_path):
    stats, _ = first_step("gpt2", tmp_path, teacher=True)
    assert stats.kl == 0
