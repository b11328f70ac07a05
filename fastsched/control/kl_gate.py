"""The threshold h0 of the token-level KL gate (control_plane.md 5)."""

import math

RATE = 0.2  # share of the way to a batch's quantile
BOUND = 0.05  # nats, the most that h0 moves in a step


def follow_quantile(h0: float | None, quantile: float) -> float | None:
    """h0 moved towards a batch's quantile of token entropy by at most BOUND nats; the first quantile is taken as it is.

    What is not finite moves nothing.
    """
    if not math.isfinite(quantile):
        return h0
    if h0 is None:
        return float(quantile)
    return h0 + min(max(RATE * (quantile - h0), -BOUND), BOUND)
