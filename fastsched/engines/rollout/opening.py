"""The rollout engine that a configuration names."""

from pathlib import Path
from typing import Sequence

from fastsched.config import RolloutConfig
from fastsched.engines.rollout.contract import RolloutEngine


def open_rollout(model_path: str | Path, cfg: RolloutConfig, *, dtype: str, max_model_len: int, seed: int,
                 stop_token_ids: Sequence[int], trust_remote_code: bool = False, log_dir: Path | None = None) -> RolloutEngine:
    """The engine that `cfg.engine` names. `dtype` is the model's, used where `cfg.dtype` is not set; servers log to `log_dir`."""
    if cfg.engine == "vllm_server":
        from fastsched.engines.rollout.server_engine import ServerRollout

        return ServerRollout(model_path, cfg, dtype=cfg.dtype or dtype, max_model_len=max_model_len, seed=seed,
                             stop_token_ids=stop_token_ids, trust_remote_code=trust_remote_code, log_dir=log_dir)
    if cfg.engine == "vllm":
        from fastsched.engines.rollout.vllm_engine import VllmRollout as Engine
    else:
        from fastsched.engines.rollout.hf_engine import TransformersRollout as Engine
    return Engine(model_path, cfg, dtype=cfg.dtype or dtype, max_model_len=max_model_len, seed=seed,
                  stop_token_ids=stop_token_ids, trust_remote_code=trust_remote_code)
