"""TRL's GRPOTrainer on the prompts of a job, timed by phase. The one module that imports TRL, in the process of `trl_process`.

What is timed are the trainer's own methods of the pinned version; nothing of it is replaced.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.step.job import Job
from fastsched.data.scorers import load_scorer
from fastsched.record.console import Phases
from fastsched.record.environment import peak_memory_gb

EVAL_BATCH = 64
LOGGED = {"success": "reward", "length": "completions/mean_length", "grad_norm": "grad_norm",
          "deviation": "sampling/sampling_logp_difference/mean"}


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer whose phases are clocked; `rows` gets one dictionary of seconds a step."""

    phases: Phases
    rows: list[dict]

    def __init__(self, job: Job, config: GRPOConfig, **parts):
        self.phases, self.rows = Phases(), []
        reward = reward_function(job)
        super().__init__(reward_funcs=reward, args=config, callbacks=[Clock(self)], **parts)
        if config.use_vllm:
            self.vllm_generation.sync_weights = self._timed("sync", self.vllm_generation.sync_weights)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.enter(name)
        try:
            yield
        finally:
            self.phases.leave()

    def _timed(self, name: str, call):
        def timed(*arguments):
            with self.phase(name):
                return call(*arguments)
        return timed

    def _prepare_inputs(self, generation_batch):
        with self.phase("other"):
            return super()._prepare_inputs(generation_batch)

    def _generate_single_turn(self, *arguments):
        with self.phase("sampling"):
            return super()._generate_single_turn(*arguments)

    def _calculate_rewards(self, *arguments):
        with self.phase("scoring"):
            return super()._calculate_rewards(*arguments)


class Clock(TrainerCallback):
    """From one step's end to the next is a step; inside it whatever is no other phase is learning, outside `other`."""

    def __init__(self, trainer: TimedTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.phases.reset()

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.phases.enter("learning")

    def on_step_end(self, args, state, control, **kwargs):
        phases = self.trainer.phases
        phases.leave()
        total, seconds = phases.step_seconds(), dict(phases.seconds)
        named = {name: seconds.get(name, 0.0) for name in ("sampling", "scoring", "learning", "sync")}
        self.trainer.rows.append({**named, "other": total - sum(named.values()), "total": total, "memory_gb": peak_memory_gb()})
        phases.reset()


def reward_function(job: Job):
    scorer = load_scorer(job.reward, "arithmetic")

    def score(prompts, completions, answer, **columns) -> list[float]:
        return [scorer(prompt=p, response=c, answer=a, meta={}) for p, c, a in zip(prompts, completions, answer, strict=True)]

    return score


def configuration(job: Job, out: Path) -> GRPOConfig:
    """The job's optimizer, loss and sampling in TRL's words. One optimizer step takes one whole batch of fresh responses."""
    batch, candidate = job.prompts_per_step * job.responses, job.candidate
    return GRPOConfig(
        output_dir=str(out), use_cpu=True, seed=job.seed, max_steps=job.steps, save_strategy="no", report_to="none", logging_steps=1,
        disable_tqdm=True, per_device_train_batch_size=batch // candidate["parts"], gradient_accumulation_steps=candidate["parts"],
        num_generations=job.responses, max_completion_length=job.tokens, shuffle_dataset=False, temperature=job.temperature,
        learning_rate=job.lr, lr_scheduler_type="constant", adam_beta1=job.betas[0], adam_beta2=job.betas[1], adam_epsilon=1e-8,
        weight_decay=job.weight_decay, max_grad_norm=job.grad_clip, loss_type="dapo", scale_rewards="group", beta=0.0,
        epsilon=job.clip[0], epsilon_high=job.clip[1], mask_truncated_completions=False, gradient_checkpointing=False,
        bf16=candidate["autocast"], dataloader_pin_memory=False, **vllm_options(job), **candidate.get("options", {}),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def vllm_options(job: Job) -> dict:
    if not job.candidate.get("vllm"):
        return {"use_vllm": False}
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    torch._dynamo.config.disable = True  # as on our side: else the first sampled batch compiles C++ for half a minute
    return {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": job.longest}


def evaluate(job: Job, trainer: GRPOTrainer, tokenizer) -> dict[str, float]:
    """Greedy success on the held-out prompts by bin."""
    scorer, right = load_scorer(job.reward, "arithmetic"), {}
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped).eval()
    tokenizer.padding_side = "left"
    for start in range(0, len(job.held_out), EVAL_BATCH):
        rows = job.held_out[start:start + EVAL_BATCH]
        asked = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
        with torch.no_grad(), trainer.accelerator.autocast():
            said = model.generate(**asked, do_sample=False, max_new_tokens=job.tokens, eos_token_id=trainer.eos_token_ids,
                                  pad_token_id=tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(said[:, asked["input_ids"].shape[1]:], skip_special_tokens=True)
        for row, text in zip(rows, texts, strict=True):
            right.setdefault(row["bin"], []).append(scorer(prompt=row["prompt"], response=text, answer=row["answer"], meta={}))
    model.train()
    return {label: sum(scores) / len(scores) for label, scores in right.items()}


def measure(job: Job, out: Path) -> dict:
    """Seconds by phase and step, what TRL logged of each step, and success before and after where the job asks for it."""
    if job.candidate.get("deepspeed"):  # which would look for a launcher
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    config = configuration(job, out)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.candidate["weights"]))
    data = Dataset.from_dict({"prompt": job.prompts, "answer": job.answers})
    trainer = TimedTrainer(job, config, model=model, train_dataset=data, processing_class=tokenizer)
    before = evaluate(job, trainer, tokenizer) if job.held_out else None
    start = time.perf_counter()
    trainer.train()
    wall = time.perf_counter() - start
    steps = [row for row in trainer.state.log_history if "reward" in row]
    rows = [{**row, **{name: logged.get(key) for name, key in LOGGED.items()}} for row, logged in zip(trainer.rows, steps, strict=True)]
    return {"steps": rows, "wall": wall, "threads": torch.get_num_threads(), "before": before,
            "after": evaluate(job, trainer, tokenizer) if job.held_out else None}
