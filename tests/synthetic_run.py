"""A run folder that looks like a real one, written through RunLog: a made-up learner whose bins improve in turn."""

import io
import math
from pathlib import Path

import numpy as np
import yaml
from rich.console import Console

from fastsched.config import LogConfig
from fastsched.record.environment import write_config, write_environment
from fastsched.record.log import RunLog

WINDOW = (0.40, 0.60)
BINS = ("1 digit", "2 digits", "3 digits", "4 digits")


def quiet() -> Console:
    return Console(file=io.StringIO(), highlight=False, width=200)


def metrics_row(step: int, total: int, rng: np.random.Generator, kind="adaptive", state: dict | None = None) -> dict:
    """One complete row; `state` carries the success average from step to step."""
    state = {} if state is None else state
    skill = np.array([1.8, 0.2, -2.2, -4.5]) + 6.0 * step / total
    p = 1 / (1 + np.exp(-skill))
    weights = np.exp(-((p - 0.5) ** 2) * 12) + 0.05 if kind == "adaptive" else np.ones(4)
    weights = weights / weights.sum()
    mean = float(weights @ p)
    target = min(max(mean, 0.45), 0.55) if kind == "adaptive" else mean
    success = float(rng.binomial(128, target) / 128)
    ema = state["ema"] = 0.9 * state.get("ema", success) + 0.1 * success
    entropy = 0.9 * math.exp(-3 * step / total) + 0.08 + 0.02 * rng.standard_normal()
    t = {"rollout": 1.9, "reward": 0.1, "learn": 3.4, "sync": 0.25, "control": 0.004}
    times = {f"t_{name}": value * float(1 + 0.08 * rng.standard_normal()) for name, value in t.items()}
    row = {
        "step": step, "tokens_total": step * 640, "prompts_total": step * 16, "responses_total": step * 64,
        "success": success, "success_ema": ema,
        "in_window": int(WINDOW[0] <= ema <= WINDOW[1]), "reward_mean": success,
        "window_reachable": int(p.min() < WINDOW[1] and p.max() > WINDOW[0]),
        "reward_std": math.sqrt(success * (1 - success)), "r_thr": 0.5, "entropy": entropy,
        "entropy_ema": entropy, "kl": 0.002 + 0.01 * step / total + 0.0005 * rng.standard_normal(),
        "kl_kind": "exact", "drift": 0.02 * (1 - math.exp(-step / 30)), "lambda_h": 1e-4 * max(0, step - total // 2),
        "lambda_kl": 0.01 * 1.1 ** max(0, step // 10 - 4), "ema_alpha": 0.99, "lr": 1e-5 * min(1, step / 5),
        "lr_scale": 1.0, "temporal_s": max(0.0, 0.5 - step / total), "kept_fraction": min(1.0, 0.5 + step / total),
        "flat_groups": 0.25 + 0.05 * rng.standard_normal(), "truncated": 0.3 * math.exp(-step / 20),
        "clip_fraction": 0.0, "ratio_deviation": 2e-6 * math.exp(0.3 * rng.standard_normal()),
        "grad_norm": 0.8 + 0.2 * rng.standard_normal() ** 2, "skipped_nonfinite": int(step == 33),
        "grad_snr": math.nan if step % 7 == 0 else 0.3 + 0.1 * rng.standard_normal(),
        "response_len_mean": 5.0 + 3 * step / total + 0.2 * rng.standard_normal(),
        "tokens_per_s": 640 / sum(times.values()), "peak_mem_gb": 3.2, "loss": 1e-9, "p_std_0": 0.05,
        "rule": "" if step < total // 2 else "low entropy: lambda_H up", **times,
        "t_step": sum(times.values()) + 0.12,
    }
    row |= {f"snr_{b}": math.nan if step % 5 == 0 else 0.5 * v * (1 - v) + 0.02 * rng.standard_normal() for b, v in enumerate(p)}
    return {**row, **{f"w_{b}": w for b, w in enumerate(weights)}, **{f"p_{b}": v for b, v in enumerate(p)}}


def write_run(folder: Path, steps: int = 60, kind: str = "adaptive", seed: int = 0, total: int | None = None, every: int = 20) -> Path:
    """A run of `steps` steps out of `total`, with configuration, environment, samples and an evaluation each `every` steps."""
    total, rng, state = total or steps, np.random.default_rng(seed), {}
    config = {"model": {"name": "builtin:smollm2"}, "data": {"task": "arithmetic"}, "rollout": {"engine": "vllm"},
              "learner": {"loss": "dapo", "lr": 1e-5, "clip": [0.2, 0.28]},
              "scheduler": {"kind": kind, "window": list(WINDOW), "temporal": {"mode": "linear"}},
              "train": {"steps": total, "seed": seed}}
    with RunLog(folder, LogConfig(tensorboard=False), total, window=WINDOW, console=quiet()) as log:
        write_config(folder, yaml.safe_dump(config, sort_keys=False))
        write_environment(folder)
        log.evaluation(0, dict(zip(BINS, (0.17, 0.03, 0.0, 0.0), strict=True)), dict.fromkeys(BINS, 64))
        for step in range(1, steps + 1):
            row = metrics_row(step, total, rng, kind, state)
            log.step(row)
            log.deciles(step, deciles(step, total))
            log.samples(step, [sample(step, i, rng) for i in range(4)])
            if step % every == 0:
                accuracy = [row[f"p_{b}"] for b in range(4)]
                log.evaluation(step, dict(zip(BINS, accuracy, strict=True)), dict.fromkeys(BINS, 64))
    return folder


def deciles(step: int, total: int) -> dict[str, list[float]]:
    """The kept region grows from the end; entropy falls along the response, KL is largest at the boundary."""
    cut = max(0, 9 - 10 * step // total)
    kept = [float(d >= cut) for d in range(10)]
    only = lambda values: [v if k else math.nan for v, k in zip(values, kept, strict=True)]
    entropy = [1.5 - 0.1 * d for d in range(10)]
    return {"kept": kept, "entropy": only(entropy), "kl": only([0.01 / (1 + abs(d - cut)) for d in range(10)]), "surprisal": entropy}


def sample(step: int, place: int, rng: np.random.Generator) -> dict:
    a, b = (int(x) for x in rng.integers(1, 10 ** (place + 1), 2))
    right = rng.random() < 0.6
    prompt = f"<|im_start|>user\nCompute {a} + {b}.<|im_end|>\n<|im_start|>assistant\n"
    return {"row": 4 * step + place, "prompt": prompt,
            "response": str(a + b) if right else f"{a + b - 1}, because <b>{a}</b> & {b} ...", "answer": str(a + b),
            "reward": float(right), "finish_reason": "stop" if right else "length", "length": 4 if right else 16}
