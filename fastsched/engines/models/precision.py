"""`model.dtype: auto`: bf16 where this machine multiplies it fast, else fp32."""

from dataclasses import replace

from fastsched.config import Config


def fast_bf16() -> bool:
    """A GPU, or a processor with vector instructions for bf16. Without them a product takes about six times as long as in fp32."""
    import torch

    return torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def settled(cfg: Config) -> Config:
    """`cfg` with the dtype that `auto` stands for here; a run keeps it wherever it goes on."""
    if cfg.model.dtype != "auto":
        return cfg
    return replace(cfg, model=replace(cfg.model, dtype="bfloat16" if fast_bf16() else "float32"))
