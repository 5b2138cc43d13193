"""Notices what a user's loop itself changes in the weights, between two calls of its learner."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_ROUNDING = 1e-6
"""Relative to the weights: what remains of a change that was made and undone, such as by a schedule-free optimizer."""


class OutsideChanges:
    """Compares the weights at which a loop computes, `[P]`, with what they were when its learner left them to it.

    Most steps need no comparison: a change in place shows in the version counters of the parameters, and one that
    avoids them, such as `parameter.data.clamp_`, in the sum of all weights.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], weights: Tensor) -> None:
        self._parameters, self._weights = parameters, weights
        self._seen = torch.empty_like(weights)
        self.leave()

    def leave(self) -> None:
        """The learner leaves the weights to the loop, as they are now."""
        self._seen.copy_(self._weights)
        self._signs = self._now()

    def find(self) -> Tensor | None:
        """What the loop has changed since `leave`, `[P]`; None: nothing."""
        if self._now() == self._signs or torch.equal(self._weights, self._seen):
            return None
        return self._weights - self._seen

    def is_rounding(self, change: Tensor) -> bool:
        """Whether a change is no larger than rounding errors of the weights."""
        return bool(torch.linalg.vector_norm(change) <= _ROUNDING * torch.linalg.vector_norm(self._seen))

    def _now(self) -> tuple[float, list[int]]:
        precise = torch.promote_types(self._weights.dtype, torch.float32)
        return float(self._weights.sum(dtype=precise)), [parameter._version for parameter in self._parameters]
