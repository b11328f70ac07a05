"""The exponential moving average every decision is taken on."""

import math


def smooth(previous: float | None, value: float, beta: float) -> float | None:
    """beta * previous + (1 - beta) * value; starts from the first value, and a non-finite value leaves `previous`."""
    if not math.isfinite(value):
        return previous
    if previous is None:
        return float(value)
    return float(beta * previous + (1 - beta) * value)
