"""The learner's weights go to the sampler, and both are compared on one sequence."""

from typing import Iterable, Sequence

import numpy as np
import torch

from fastsched.config import Config, ConfigError
from fastsched.engines.rollout.contract import RolloutEngine, measure_sync, require_sync
from fastsched.engines.rollout.weights import SyncError, layer_fingerprints
from fastsched.learn.learner import Learner
from fastsched.types import SAMPLER_ERRORS

SYNC_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}  # bf16 logits near 30 are 0.125 apart


def sync(cfg: Config, learner: Learner, rollout: RolloutEngine, version: int, token_ids: Sequence[int]) -> None:
    """Give the sampler the learner's weights and compare both on `token_ids`; raises SyncError on every rank alike."""
    load_weights(rollout, learner.engine.named_weights(), version)
    check = measure_sync(rollout, token_ids, learner.logp(token_ids))
    worst = type(check)(*learner.ranks.all_reduce(np.array(check), op="max").tolist())
    fingerprints = lambda: layer_fingerprints(learner.engine.named_weights(), rollout.dtype)
    require_sync(rollout, worst, _tolerance(cfg, rollout), version, fingerprints)


def _tolerance(cfg: Config, rollout: RolloutEngine) -> float:
    if cfg.rollout.sync_tolerance is not None:
        return cfg.rollout.sync_tolerance
    return max(SYNC_TOLERANCE[str(rollout.dtype).removeprefix("torch.")], SYNC_TOLERANCE[cfg.model.dtype])


def load_weights(rollout: RolloutEngine, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
    """Whatever the sampler raises half way becomes a SyncError that names the parameter."""
    sent = ["nothing"]

    def named():
        for name, weight in weights:
            sent.append(name)
            yield name, weight

    try:
        rollout.load_weights(named(), version)
    except (SyncError, ConfigError):
        raise
    except SAMPLER_ERRORS as error:
        raise SyncError(f"weight sync, version {version}: the sampler failed at {sent[-1]} ({type(error).__name__}: {error}); what it "
                        "holds now is unusable, the learner and its checkpoints are not touched: continue with --resume") from error
