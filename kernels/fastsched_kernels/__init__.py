"""Fused kernels for the policy loss of language models; truth: `reference`.

Entry points: `linear`, `trajectory`, `averaging`; `implementation` says what computes them here.
"""

from fastsched_kernels.implementations import implementation

__all__ = ["implementation"]
