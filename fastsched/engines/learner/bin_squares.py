"""Squared gradient norms by difficulty bin, beside DeepSpeed's own accumulation."""

import torch
from torch import nn


class BinSquares:
    """Sums the gradients of consecutive micro-batches of one bin in fp32, one more gradient of memory, and keeps their squared norm.

    Micro-batches of bin -1 are left out; without others nothing is held.
    """

    def __init__(self):
        self._bin, self._sums = -1, {}
        self._squares: dict[int, float] = {}

    def begin(self, bin: int) -> None:
        """The gradients that follow belong to `bin`; those of a bin come one after another."""
        if bin != self._bin:
            self._close()
            self._bin = bin

    def add(self, parameter: nn.Parameter, grad: torch.Tensor) -> None:
        if self._bin < 0:
            return
        if parameter in self._sums:
            self._sums[parameter] += grad
        else:
            self._sums[parameter] = grad.detach().to(torch.float32, copy=True)

    def take(self) -> dict[int, float]:
        """Squared norm of each bin's sum since the last call."""
        self._close()
        squares, self._squares = self._squares, {}
        return squares

    def _close(self) -> None:
        if self._bin >= 0:
            parts = [torch.linalg.vector_norm(g).double().square() for g in self._sums.values()]
            self._squares[self._bin] = float(sum(parts))
        self._bin, self._sums = -1, {}
