"""Changes of the weights in units of the learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def divided(change: Tensor, rate: float | Tensor, at_rest: float | Tensor = 0.0) -> Tensor:
    """A change `[n]` divided by the learning rate, that of all weights or of each, `[n]`; `at_rest` where that is 0,
    because steps have moved nothing there."""
    if isinstance(rate, float):
        return change / rate if rate else 0.0 * change + at_rest
    return (change / rate).where(rate != 0.0, at_rest)
