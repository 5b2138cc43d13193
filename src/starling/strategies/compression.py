"""Compression of what learners average: an option of strategies, with error feedback."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from starling.configuration import Config
from starling.learner import Handle, Learner

if TYPE_CHECKING:
    from torch import Tensor

    from starling.strategies.encoding import Encoding, PartOfMean


class TopK(Config):
    """Send the largest numbers alone."""

    top_k: float = Field(gt=0.0, le=0.25)
    """The fraction of the numbers that are sent, 8 bytes each."""


Compression = Literal["none", "bfloat16", "int8", "int4"] | TopK
"""How vectors are encoded for sending; what an encoding takes away is added to the next message."""


def is_compressed(options: Config) -> bool:
    """Whether a strategy with these options sends anything encoded."""
    return getattr(options, "compression", "none") != "none"


def find_encoding(compression: Compression) -> Encoding | None:
    """The encoding that an option names; None: numbers travel as they are."""
    from starling.strategies.encoding import Bfloat16, Integers, Largest

    if isinstance(compression, TopK):
        return Largest(compression.top_k)
    return {"none": None, "bfloat16": Bfloat16(), "int8": Integers(8), "int4": Integers(4)}[compression]


def encode(encoding: Encoding, vector: Tensor) -> Tensor:
    """The bytes of a vector; in a simulation of time alone, their number."""
    if vector.device.type != "meta":
        return encoding.encode(vector)
    import torch

    return torch.empty(encoding.num_bytes(len(vector)), dtype=torch.uint8, device="meta")


def decode(encoding: Encoding, encoded: Tensor, like: Tensor) -> Tensor:
    """The vector that was encoded, of the size of `like`."""
    return like if like.device.type == "meta" else encoding.decode(encoded, len(like))


class Means:
    """The means of one strategy: as they are, or of vectors that travel encoded, with error feedback.

    `PartOfMean` has the equation. The residual `[P]` is part of a learner's checkpoint. It changes when a mean is
    awaited, so that a mean that was under way when a checkpoint was saved can begin again with the same bits. A mean
    that is not finite leaves it as it was, because its mini-batch is left out. A single learner encodes nothing.
    """

    def __init__(self, me: Learner, compression: Compression) -> None:
        self._me = me
        self._encoding = find_encoding(compression) if me.world > 1 else None
        if self._encoding is not None:
            import torch

            zeros = torch.zeros(len(me.weights)) if me.weights.device.type != "meta" else me.weights
            self._residual = me.strategy_state("residual", zeros, is_common=False)

    @property
    def are_encoded(self) -> bool:
        """Whether vectors are encoded."""
        return self._encoding is not None

    def start(self, of: Tensor | Handle[Tensor], piece: slice | None = None) -> Awaitable[Tensor]:
        """Start averaging a vector `[P]` over all learners, or the `piece` of one. A gradient's handle is first
        awaited if vectors are encoded."""
        if self._encoding is None:
            return self._me.mean(of)
        return _UnderWay(self._me, self._encoding, of, self._residual[piece or slice(None)])

    def forget(self) -> None:
        """Set the residual to 0, because something else is averaged from now on."""
        if self._encoding is not None:
            self._residual.zero_()


class _UnderWay:
    """An encoded mean that has begun; when it is awaited, the residual changes."""

    def __init__(self, me: Learner, encoding: Encoding, of: Tensor | Handle[Tensor], residual: Tensor) -> None:
        self._me, self._encoding, self._residual = me, encoding, residual
        self._work = of if isinstance(of, Handle) else self._begin(of)

    def __await__(self) -> Generator[Handle[Any], None, Tensor]:
        return self._finish().__await__()

    def _begin(self, vector: Tensor) -> tuple[PartOfMean, Handle[Tensor]]:
        from starling.strategies.encoding import PartOfMean

        part = PartOfMean(self._encoding, vector, self._residual, self._me.rank, self._me.world)
        return part, self._me.encoded_mean(part)

    async def _finish(self) -> Tensor:
        part, handle = self._begin(await self._work) if isinstance(self._work, Handle) else self._work
        mean = await handle
        if part.has_numbers and bool(mean.isfinite().all()):
            self._residual.copy_(part.residual)
        return mean.to(self._me.weights.device)
