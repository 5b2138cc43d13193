"""Means of vectors over all learners. Vectors are sent unchanged, or encoded with error feedback."""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from starling.configuration import Config
from starling.learner import Handle, Learner

if TYPE_CHECKING:
    from torch import Tensor

    from starling.strategies.parts.encodings import Encoding, LowRankMeans


class TopK(Config):
    """Send only the largest numbers."""

    top_k: float = Field(gt=0.0, le=0.25)
    """The fraction of the numbers that are sent, 8 bytes each."""
    bits: Literal[2] | None = None
    """Number of bits: with 2, send each number in 2 bits and its place in 2 bytes, the largest of every 4096
    numbers."""

    def __str__(self) -> str:
        return f"{{top_k: {self.top_k:g}{'' if self.bits is None else f', bits: {self.bits}'}}}"


class LowRank(Config):
    """Send two thin factors of each matrix, whose product approximates it (PowerSGD)."""

    low_rank: int = Field(ge=1)
    """Number of columns of a factor."""


Encoded = Literal["none", "bfloat16", "int8", "int4", "int2"] | TopK
"""Encoding of vectors for sending. The error of an encoding is added to the next message."""
Compression = Encoded | LowRank
"""Encoding of vectors for sending, or factors of matrices."""


def is_compressed(options: Config) -> bool:
    """Return whether a strategy with these options sends anything encoded."""
    return getattr(options, "compression", "none") != "none"


def find_encoding(compression: Encoded) -> Encoding | None:
    """Return the encoding that an option names, or None if numbers are sent unchanged."""
    from starling.strategies.parts.encodings import Bfloat16, CoarseLargest, Integers, Largest

    if isinstance(compression, TopK):
        return (Largest if compression.bits is None else CoarseLargest)(compression.top_k)
    if compression.startswith("int"):
        return Integers(int(compression[3:]))
    return None if compression == "none" else Bfloat16()


class Means:
    """The means of a strategy's vectors `[P]`, or of pieces of them.

    With compression, a vector is sent encoded, and the error of the encoding is kept in a `Residual` for each piece.
    Numbers of few bits are sent through owners (`OwnersMean`), the largest numbers from each learner to all others
    (`GatheredMean`), and matrices as two factors (`LowRankMeans`). A mean that is not finite leaves the residuals
    unchanged, because its mini-batches are left out. A learner that is alone encodes nothing.
    """

    def __init__(
        self, me: Learner, compression: Compression = "none", pieces: Sequence[slice] = (), feedback: float = 1.0
    ) -> None:
        self._me = me
        self.are_encoded = compression != "none" and me.world > 1
        self._encoding: Encoding | None = None
        self._factors: LowRankMeans | None = None
        self._residuals: dict[int, Residual] = {}
        self._is_gathered = isinstance(compression, TopK)
        if self.are_encoded:
            from starling.strategies.parts.encodings import LowRankMeans

            if isinstance(compression, LowRank):
                self._factors = LowRankMeans(me, compression.low_rank)
            else:
                self._encoding = find_encoding(compression)
            for piece in pieces or me.optimizer.pieces(len(me.weights)):
                self._residuals[piece.start] = Residual(me, piece, feedback, self._factors is None)

    def start(self, of: Tensor | Handle[Tensor], piece: slice | None = None) -> Awaitable[Tensor]:
        """Start averaging a vector `[P]`, or a `piece` of a vector. If the vector is sent encoded, a gradient is
        completed first, and the mean is -0.0 where no learner has sent anything, as for parameters without a
        gradient."""
        if not self.are_encoded:
            return self._me.mean(of)
        if isinstance(of, Handle):
            return self._of_gradient(of)
        residual = self._residuals[piece.start if piece is not None else 0]
        from starling.strategies.parts.encodings import GatheredMean, OwnersMean

        total, left, mean = residual.added_to(of), residual.following, GatheredMean if self._is_gathered else OwnersMean
        if self._encoding is None:
            return _UnderWay(self._me, self._factors.mean(of, total, left), residual)  # type: ignore[union-attr]
        return _UnderWay(self._me, mean(self._me, self._encoding, total, left), residual)

    async def _of_gradient(self, gradient: Handle[Tensor]) -> Tensor:
        return await self.start(await gradient)


class Residual:
    """The error feedback of one learner for a piece of its vectors: e `[n]`, float32.

    Equation, for mean k of vectors v, with q the vector that the learner sends, and beta = `feedback`::

        total = v + beta e_k,  e_(k+1) = total - q

    A residual always has the unit of one learner's vector. For a learner, it is the part of its own vectors that it has
    not sent yet. For the owner of a chunk, it is L times the part of the mean that the owner has not returned yet. A
    residual therefore has the same meaning for any number of learners, and stays with its learner when the membership
    changes. A joiner starts at 0, and the residual of a lost learner is lost.

    e_(k+1) is written beside e_k when mean k is sent, and replaces e_k when the mean is used. The number of means used
    determines which of the two is current. This number is common state: after a loss, all learners copy it from the
    most advanced learner. A learner that sent its part of a mean, and lost a peer before it received that mean, thus
    knows whether the other learners have used the mean.
    """

    def __init__(self, me: Learner, piece: slice, feedback: float, is_on_host: bool) -> None:
        import torch

        weights, name = me.weights[piece], "" if piece.start == 0 else f" {piece.start}"
        zeros = weights.new_zeros(2, len(weights), dtype=torch.float32)
        zeros = zeros.cpu() if is_on_host and not weights.is_meta else zeros
        self._both = me.strategy_state(f"residual{name}", zeros, is_common=False)
        self._num_used = me.strategy_state(f"means{name}", torch.zeros(1, dtype=torch.int64))
        self._feedback = feedback

    def added_to(self, vector: Tensor) -> Tensor:
        """Return the sum of `vector` `[n]` and the residual, in new memory on the residual's device."""
        now = self._both[int(self._num_used) % 2]
        return vector.to(now.device, now.dtype).add(now, alpha=self._feedback)

    @property
    def following(self) -> Tensor:
        """The memory for the next residual `[n]`, which results from the mean under way."""
        return self._both[(int(self._num_used) + 1) % 2]

    def use(self) -> None:
        """Record that the mean under way is used."""
        self._num_used.add_(1)


class _UnderWay:
    """An encoded mean under way. When the mean is used, the residual changes."""

    def __init__(self, me: Learner, mean: Awaitable[Tensor], residual: Residual) -> None:
        self._mean, self._residual, self._device = mean, residual, me.weights.device

    def __await__(self) -> Generator[Handle[Any], None, Tensor]:
        mean = yield from self._mean.__await__()
        if mean.is_meta:
            return mean
        if bool(mean.isfinite().all()):
            self._residual.use()
        return mean.to(self._device).masked_fill_(mean == 0.0, -0.0)
