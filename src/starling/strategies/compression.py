"""Compression of what learners average: an option of strategies, with error feedback."""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from starling.configuration import Config
from starling.errors import ConfigError
from starling.learner import Handle, Learner

if TYPE_CHECKING:
    from torch import Tensor

    from starling.strategies.encoding import Encoding, PartOfMean


class TopK(Config):
    """Send the largest numbers alone."""

    top_k: float = Field(gt=0.0, le=0.25)
    """The fraction of the numbers that are sent, 8 bytes each."""
    bits: Literal[2] | None = None
    """2: send each number in 2 bits and its place in 2 bytes, from every 4096 numbers their largest."""

    def __str__(self) -> str:
        return f"{{top_k: {self.top_k:g}{'' if self.bits is None else f', bits: {self.bits}'}}}"


class LowRank(Config):
    """Send two thin factors of each matrix, of which the product is near it (PowerSGD)."""

    low_rank: int = Field(ge=1)
    """The columns of a factor."""


Encoded = Literal["none", "bfloat16", "int8", "int4"] | TopK
"""How vectors are encoded for sending; what an encoding takes away is added to the next message."""
Compression = Encoded | LowRank
"""The same, or factors of matrices."""


def is_compressed(options: Config) -> bool:
    """Whether a strategy with these options sends anything encoded."""
    return getattr(options, "compression", "none") != "none"


def find_encoding(compression: Encoded) -> Encoding | None:
    """The encoding that an option names; None: numbers travel as they are."""
    from starling.strategies.encoding import Bfloat16, CoarseLargest, Integers, Largest

    if isinstance(compression, TopK):
        return (Largest if compression.bits is None else CoarseLargest)(compression.top_k)
    return {"none": None, "bfloat16": Bfloat16(), "int8": Integers(8), "int4": Integers(4)}[compression]


class Means:
    """The means of one strategy: as they are, or of vectors that travel encoded, with error feedback.

    `PartOfMean` and `Factors` have the equations. The residual `[P]` is part of a learner's checkpoint. It changes when
    a mean is awaited, so that a mean that was under way when a checkpoint was saved can begin again with the same bits.
    A mean that is not finite leaves it as it was, because its mini-batch is left out. A single learner encodes nothing.
    `feedback` is the share of the residual that is added to the next message, of an encoding.
    """

    def __init__(self, me: Learner, compression: Compression, feedback: float = 1.0) -> None:
        self._me, self._feedback = me, feedback
        self.are_encoded = compression != "none" and me.world > 1
        self._how: Encoding | Factors | None = None
        if self.are_encoded:
            import torch

            is_on_host = not (isinstance(compression, LowRank) or me.weights.is_meta)
            zeros = torch.zeros(len(me.weights)) if is_on_host else me.weights.new_zeros(len(me.weights))
            self._residual = me.strategy_state("residual", zeros, is_common=False)
            self._how = Factors(me, compression) if isinstance(compression, LowRank) else find_encoding(compression)

    def start(self, of: Tensor | Handle[Tensor], piece: slice | None = None) -> Awaitable[Tensor]:
        """Start averaging a vector `[P]` over all learners, or the `piece` of one. A gradient's handle is first
        awaited if vectors are encoded."""
        if self._how is None:
            return self._me.mean(of)
        if isinstance(of, Handle):
            return self._of_gradient(of)
        if isinstance(self._how, Factors):
            return self._how.mean(of, self._residual)
        from starling.strategies.encoding import PartOfMean

        residual = self._residual[piece or slice(None)]
        added = residual if self._feedback == 1.0 else self._feedback * residual
        return _UnderWay(self._me, PartOfMean(self._how, of, added, self._me.rank, self._me.world), residual)

    async def _of_gradient(self, gradient: Handle[Tensor]) -> Tensor:
        return await self.start(await gradient)

    def forget(self) -> None:
        """Set the residual to 0, because something else is averaged from now on."""
        if self.are_encoded:
            self._residual.zero_()


class Factors:
    """Means of which each matrix is the product of two thin factors.

    Equation, for a matrix M_l `[n, m]` of learner l (a parameter of at least two dimensions, the first against all
    others), with e_l its residual and Q `[m, r]` the last second factor, initially random and the same on all::

        M_l <- M_l + e_l
        P <- orthogonalise((1/L) sum_l M_l Q)
        Q_l <- M_l^T P,  e_l <- M_l - P Q_l^T
        Q <- (1/L) sum_l Q_l,  mean = P Q^T

    This is one step of subspace iteration towards the r largest singular vectors of the mean. Matrices that two factors
    would not make smaller, and vectors, are averaged as they are.

    References:
        Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
        arXiv 1905.13727.
    """

    def __init__(self, me: Learner, compression: LowRank) -> None:
        import torch

        if me.weights.device.type == "meta":
            raise ConfigError(
                "strategy.compression: the bytes of low_rank depend on the shapes of the model's matrices, which a "
                "simulation of time alone does not know; choose another compression to plan with"
            )
        self._me, self._rank = me, (rank := compression.low_rank)
        self._matrices: list[tuple[slice, int, int]] = []  # place in the weights, rows, columns
        self._others: list[slice] = []
        start = 0
        for shape in me.shapes:
            stop, rows = start + shape.numel(), shape[0] if len(shape) > 1 else 1
            columns = shape.numel() // max(1, rows)
            if rank * (rows + columns) < rows * columns:
                self._matrices.append((slice(start, stop), rows, columns))
            else:
                self._others.append(slice(start, stop))
            start = stop
        size = rank * sum(columns for _, _, columns in self._matrices)
        random = torch.randn(size, generator=torch.Generator().manual_seed(me.seed))
        self._basis = me.strategy_state("basis", random.to(me.weights.device))

    async def mean(self, vector: Tensor, residual: Tensor) -> Tensor:
        """The mean of vectors `[P]`; `residual` `[P]` changes."""
        import torch

        total, others = vector + residual, [vector[piece] for piece in self._others]
        matrices = [total[place].view(rows, columns) for place, rows, columns in self._matrices]
        bases = self._split(self._basis, [columns for _, _, columns in self._matrices])
        products = [matrix @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        first = await self._me.mean(torch.cat([each.reshape(-1) for each in (*products, *others)]))
        if not bool(first.isfinite().all()):
            return torch.full_like(vector, torch.nan)
        left = [torch.linalg.qr(each)[0] for each in self._split(first, [rows for _, rows, _ in self._matrices])]
        own = [matrix.T @ each for matrix, each in zip(matrices, left, strict=True)]
        if self._matrices:
            self._basis.copy_(await self._me.mean(torch.cat([each.reshape(-1) for each in own])))
        mean, start = torch.empty_like(vector), sum(each.numel() for each in products)
        for (place, _, _), matrix, p, q_own, q in zip(self._matrices, matrices, left, own, bases, strict=True):
            residual[place] = (matrix - p @ q_own.T).view(-1)
            mean[place] = (p @ q.T).view(-1)
        for piece, other in zip(self._others, torch.split(first[start:], [len(each) for each in others]), strict=True):
            mean[piece] = other
        return mean.masked_fill_(mean == 0.0, -0.0)  # the mark of a parameter without a gradient

    def _split(self, vector: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Views of a vector's beginning as matrices `[size, r]`."""
        import torch

        numbers = [size * self._rank for size in sizes]
        return [each.view(-1, self._rank) for each in torch.split(vector[: sum(numbers)], numbers)]


class _UnderWay:
    """An encoded mean that has begun; when it is awaited, the residual changes."""

    def __init__(self, me: Learner, part: PartOfMean, residual: Tensor) -> None:
        self._part, self._residual, self._device = part, residual, me.weights.device
        self._mean = me.encoded_mean(part)

    def __await__(self) -> Generator[Handle[Any], None, Tensor]:
        mean = yield from self._mean.__await__()
        if not self._part.vector.is_meta and bool(mean.isfinite().all()):
            self._residual.copy_(self._part.residual)
        return mean.to(self._device)
