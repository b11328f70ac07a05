"""Difficulty bins of equal counts from one number a prompt. N prompts, k bins."""

import numpy as np


def equal_count_bins(values: np.ndarray, k: int) -> np.ndarray:
    """Cut `values` [N] (finite, larger is harder) into at most k bins of nearly equal counts; returns [N] int64.

    Bins are numbered 0 (easiest) upwards without gaps. Equal values always share a bin: a cut that would split a run
    of ties moves to the nearer end of the run, so heavy ties give unequal or fewer bins; a constant column gives one.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError("equal_count_bins: needs a vector of finite numbers")
    ordered = np.sort(values)
    n = len(ordered)
    edges = []
    for cut in (round(i * n / k) for i in range(1, k)):
        if not 0 < cut < n:
            continue
        low, high = np.searchsorted(ordered, ordered[cut], "left"), np.searchsorted(ordered, ordered[cut], "right")
        start = low if cut - low <= high - cut else high
        if 0 < start < n:
            edges.append(ordered[start])
    return np.searchsorted(np.unique(edges), values, "right").astype(np.int64)
