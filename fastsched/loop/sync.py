"""The learner's weights go to the sampler; both are compared tensor by tensor, and on one sequence."""

from typing import Iterable, Sequence

import numpy as np
import torch

from fastsched.config import Config, ConfigError
from fastsched.engines.rollout.contract import RolloutEngine, measure_sync, require_sync, require_weights
from fastsched.engines.rollout.fingerprints import row_sums, totals
from fastsched.engines.rollout.weights import SyncError
from fastsched.learn.learner import Learner
from fastsched.types import SAMPLER_ERRORS, Ranks

SYNC_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}  # bf16 logits near 30 are 0.125 apart
AFTERWARDS = "the learner and its checkpoints are not touched: continue with --resume"


def sync(cfg: Config, learner: Learner, rollout: RolloutEngine, version: int, token_ids: Sequence[int]) -> None:
    """Give the sampler the learner's weights; SyncError on every rank alike where it does not hold them or scores `token_ids` otherwise."""
    sent = load_weights(rollout, learner.engine.named_weights(), version)
    require_weights_everywhere(learner.ranks, rollout, sent, version)
    check = measure_sync(rollout, token_ids, learner.logp(token_ids))
    worst = type(check)(*learner.ranks.all_reduce(np.array(check), op="max").tolist())
    require_sync(worst, _tolerance(cfg, rollout), version)


def _tolerance(cfg: Config, rollout: RolloutEngine) -> float:
    if cfg.rollout.sync_tolerance is not None:
        return cfg.rollout.sync_tolerance
    return max(SYNC_TOLERANCE[str(rollout.dtype).removeprefix("torch.")], SYNC_TOLERANCE[cfg.model.dtype])


def load_weights(rollout: RolloutEngine, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, int]:
    """The fingerprint of every tensor as it was sent, in the sampler's dtype.

    Whatever the sampler raises half way becomes a SyncError that names the parameter. What it does not take is gathered all the same,
    as the other ranks gather it.
    """
    sums: dict[str, torch.Tensor] = {}

    def named():
        for name, weight in weights:
            sums[name] = row_sums(weight.detach().to(rollout.dtype))
            yield name, weight

    stream = named()
    try:
        rollout.load_weights(stream, version)
    except (SyncError, ConfigError):
        raise
    except SAMPLER_ERRORS as error:
        raise SyncError(f"weight sync, version {version}: the sampler failed at {next(reversed(sums), 'nothing')} ({type(error).__name__}: "
                        f"{error}); what it holds now is unusable, {AFTERWARDS}") from error
    for _ in stream:
        pass
    return dict(zip(sums, totals(list(sums.values())).tolist(), strict=True))


def require_weights_everywhere(ranks: Ranks, rollout: RolloutEngine, sent: dict[str, int], version: int) -> None:
    """`require_weights` on this rank and every other: if one of them fails, all raise its SyncError."""
    failure = ""
    try:
        require_weights(rollout, sent, version)
    except SyncError as error:
        failure = str(error)
    except SAMPLER_ERRORS as error:
        failure = f"weight sync, version {version}: whether the sampler holds what was sent cannot be told: {error}"
    failures = {rank: text for rank, text in enumerate(ranks.all_gather(failure)) if text}
    for rank, text in failures.items():
        where = f"rank {rank}: " if ranks.world_size > 1 else ""
        raise SyncError(f"{where}{text}; {AFTERWARDS}")
