"""CHOCO: learners send the changes of their weights, and know each other's public copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

from starling.errors import ConfigError
from starling.strategies.parts.means import TopK, find_encoding
from starling.strategies.parts.mixing import Encoder, Keep, forgotten, has_fixed_neighbours, sum_of_differences
from starling.topology import find_topology

if TYPE_CHECKING:
    from torch import Tensor

    from starling.strategies.parts.encodings import Encoding

Differences = Literal["int8", "int4"] | TopK
"""Encoding of the changes of weights."""


class PublicCopies(Encoder):
    """Sends the changes of weights since their public copy, which all neighbours know.

    Equation, for learner l, with x its weights, y its public copy, C the encoding, T the mixing matrix, the same in
    each round, and gamma the consensus rate::

        send  q_l = C(x_l - y_l)
        y_l <- y_l + q_l
        d_l <- d_l + sum_j T_jl (q_j - q_l)
        x_l <- x_l + gamma d_l

    so that d_l is the mixture of the public copies minus learner l's own. It is kept as a difference because a mixture
    is rounded: learners with equal copies would add that rounding to their weights in each round.

    y and d belong to a membership. In its first round q is x, as float32: public copies begin equal to the weights. In
    the paper they begin at 0.

    References:
        Koloskova et al. 2019, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
        Communication", arXiv 1902.00340.
    """

    def __init__(
        self, weights: Tensor, pieces: Sequence[slice], compression: Differences, gamma: float, keep: Keep = forgotten
    ) -> None:
        import torch

        self._encoding = cast("Encoding", find_encoding(compression))
        self._gamma, self._num_pieces = gamma, len(pieces)
        zeros = weights.new_zeros(pieces[-1].stop if pieces else 0)
        self._public = keep("public", zeros)
        self._differences = keep("differences", zeros.clone())
        self._begun = keep("pieces begun", torch.zeros(1, dtype=torch.int64))  # pieces, which take turns

    def encode(self, mine: Tensor, piece: slice) -> Tensor:
        import torch

        public = self._public[piece]
        if int(self._begun) < self._num_pieces:
            self._begun.add_(1)
            public.copy_(mine)
            return mine
        mine.sub_(public)
        if mine.is_meta:
            return mine.new_empty(self._encoding.num_bytes(len(mine)), dtype=torch.uint8)
        sent = self._encoding.encode(mine)
        mine.copy_(self._encoding.decode(sent, len(mine)))
        public.add_(mine)
        return sent

    def change(self, own: Tensor, theirs: Sequence[tuple[float, Tensor]], piece: slice) -> Tensor:
        whole = [(weight, self._decoded(sent, own)) for weight, sent in theirs]
        return self._differences[piece].add_(sum_of_differences(own, whole)) * self._gamma

    def _decoded(self, sent: Tensor, own: Tensor) -> Tensor:
        return sent if sent.dtype == own.dtype else self._encoding.decode(sent, len(own))


def check_fixed_neighbours(pattern: str, world: int) -> None:
    """Raise ConfigError if learners would not know the changes of each other's weights."""
    if not has_fixed_neighbours(find_topology(pattern, world, seed=0)):
        raise ConfigError(
            f"strategy.compression: learners would have to know what has changed in each other's weights, but under "
            f"pattern {pattern} neighbours change from round to round; choose pattern ring or complete, or "
            "compression bfloat16"
        )
