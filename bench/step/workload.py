"""What both sides of `bench.step` train: one command line for us, one job for the peer, the same prompts in the same order."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from bench.step.job import Job
from fastsched.config import Config, require
from fastsched.config.arguments import parse_config, preset_path
from fastsched.control.scheduler import Scheduler
from fastsched.data.datasets import PromptSet
from fastsched.engines.models.loading import load_tokenizer
from fastsched.engines.models.precision import settled
from fastsched.loop.prepare import load_data, prepare_model

NO_KL = ("--learner.kl", "none", *(part for name in ("kl", "entropy") for edge in ("start", "floor", "ceiling")
                                   for part in (f"--scheduler.{name}.{edge}", "0")))
PLAIN = ("--scheduler.kind", "uniform", "--scheduler.coefficients", "constant", "--learner.warmup_steps", "0", "--learner.cooldown", "0",
         "--log.plots", "false", "--log.tensorboard", "false", *NO_KL)
"""One update a batch at a constant learning rate, neither KL nor entropy term, prompts in an order that no result changes."""


@dataclass(frozen=True)
class Workload:
    """A model and what is asked of it. `tokens`: the longest responses, one measurement each; `rounds` and `steps`: of a measurement."""

    preset: str
    prompts: int
    tokens: tuple[int, ...]
    rounds: int
    steps: int
    options: tuple[str, ...] = ()
    responses: int = 8


WORKLOADS = {
    "tiny": Workload("tiny-cpu", 32, (8, 32), rounds=3, steps=21),
    "smollm2": Workload("smollm2-cpu", 16, (16,), rounds=3, steps=3,
                        options=("--data.digits", "[1,2]", "--data.prefill", "null", "--data.size", "20000")),
}
"""`smollm2`: without the demo's prefill, so that an answer ("25 + 17 = 42") has most of the 16 tokens."""


def arguments(work: Workload, tokens: int, steps: int, seed: int, curve: bool) -> list[str]:
    """Of `fastsched train`; with `curve` it evaluates before the first and after the last step."""
    return ["--preset", work.preset, *PLAIN, *work.options, "--train.seed", str(seed), "--train.prompts_per_step", str(work.prompts),
            "--rollout.responses", str(work.responses), "--rollout.max_new_tokens", str(tokens), "--train.steps", str(steps),
            "--train.eval_at_ends", str(curve).lower(), "--log.samples_per_step", str(work.prompts)]


def config(work: Workload, tokens: int, steps: int, seed: int = 0, curve: bool = False) -> Config:
    options = arguments(work, tokens, steps, seed, curve)
    return settled(parse_config(["--config", str(preset_path(work.preset)), *options[2:]]))


def label(digits: int) -> str:
    """Of a difficulty bin, as evals.jsonl names it."""
    return f"{digits} digit{'s' * (digits > 1)}"


def drawn_rows(cfg: Config, prompts: PromptSet) -> list[list[int]]:
    """The dataset rows of every step, which nothing that happens in a run changes."""
    scheduler = Scheduler(cfg.scheduler, prompts.bins, cfg.train.prompts_per_step, cfg.train.steps, cfg.train.seed)
    return [scheduler.next_prompts().rows.tolist() for _ in range(cfg.train.steps)]


def load_parts(cfg: Config) -> tuple[Path, PreTrainedTokenizerBase, PromptSet, PromptSet]:
    """Model folder, tokenizer, training and held-out prompts."""
    path = prepare_model(cfg)
    tokenizer = load_tokenizer(path, cfg.model)
    return path, tokenizer, *load_data(cfg.data, tokenizer, cfg.train.seed, cfg.train.prompts_per_step)


def make_job(cfg: Config, candidate: dict, curve: bool) -> Job:
    """ConfigError where a prompt's text would not be encoded as our token ids."""
    path, tokenizer, train_set, held_out = load_parts(cfg)
    asked = [train_set.prompt(row) for step in drawn_rows(cfg, train_set) for row in step]
    held = [held_out.prompt(i) for i in range(len(held_out))] if curve else []
    texts = [text_of(tokenizer, prompt.token_ids) for prompt in [*asked, *held]]
    rows = [{"prompt": text, "answer": p.answer, "bin": label(cfg.data.digits[p.bin])}
            for text, p in zip(texts[len(asked):], held, strict=True)]
    r, opt = cfg.rollout, cfg.learner
    return Job(str(path), cfg.reward.kind, texts[:len(asked)], [p.answer for p in asked], cfg.train.prompts_per_step, r.responses,
               r.max_new_tokens, cfg.longest, cfg.train.steps, cfg.train.seed, r.temperature, opt.lr, opt.betas, opt.weight_decay,
               opt.grad_clip, opt.clip, candidate, rows)


def text_of(tokenizer, token_ids: tuple[int, ...]) -> str:
    text = tokenizer.decode(token_ids)
    require(tuple(tokenizer(text)["input_ids"]) == tuple(token_ids), f"bench.step: the prompt {text!r} is not encoded as it was decoded")
    return text
