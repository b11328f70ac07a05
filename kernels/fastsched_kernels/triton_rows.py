"""The Triton implementation: CUDA, or any device under Triton's interpreter."""

from fastsched_kernels.policy_loss import policy_rows_
from fastsched_kernels.token_stats import row_dlogits_, row_stats

__all__ = ["policy_rows_", "row_dlogits_", "row_stats"]
