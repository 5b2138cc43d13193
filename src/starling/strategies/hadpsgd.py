"""Hierarchical ADPSGD: learners of a super-learner step together; super-learners average asynchronously."""

from collections.abc import Mapping, Sequence

from pydantic import Field

from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies.base import Strategy, gossip
from starling.strategies.parts.background import BackgroundOptions, check_background, encoder_of
from starling.strategies.parts.mixing import Mixing, one_ahead
from starling.topology import Topology, find_topology

DROPPED = ("k", "encoder")
"""Attributes that are dropped with a membership, as in the background of `adpsgd`: a round under way is abandoned."""


class HierarchicalOptions(BackgroundOptions):
    """The options of `hadpsgd`."""

    per_node: int = Field(ge=1)
    """Number of learners per super-learner, usually one for each device of a node. Learners 0 to per_node - 1 form the
    first super-learner."""


def _check(options: HierarchicalOptions, world: int) -> None:
    if world % options.per_node:
        raise ConfigError(
            f"strategy.per_node: {world} learners cannot be divided into super-learners of {options.per_node}"
        )
    check_background(options, world // options.per_node)


class OfSuperLearners(Strategy):
    """A strategy in which a super-learner that lost a learner cannot continue."""

    def size_of_unit(self, options: HierarchicalOptions) -> int:
        return options.per_node


@gossip(
    "hadpsgd",
    "step together within a super-learner, and average as in adpsgd between super-learners",
    HierarchicalOptions,
    sync_group_size=lambda options, world: options.per_node,
    check=_check,
    averages_gradients=lambda options: options.per_node > 1,
    of=OfSuperLearners,
)
async def hadpsgd(me: Learner, options: HierarchicalOptions) -> None:
    """A super-learner's learners step together with their mean gradient; super-learners average as under `adpsgd`.

    Equation, for super-learners n of G learners each::

        background:  W <- W T_k
        together:    w_n <- w_n - a (1/G) sum_i g_ni(Phi_n)

    with W `[P, L / G]` the weights, one column for each super-learner; T_k the mixing matrix of round k; a the step
    size of the local optimizers, the same on all learners of a super-learner; Phi_n the value of w_n when the gradient
    began.

    Each learner exchanges its share of the weights with its counterparts in other super-learners. The super-learner
    then sums these changes, so that no single process carries the node's traffic. Learners of one super-learner apply
    the changes at different times: their weights agree up to rounding, and their gradients may be one round apart.

    Waits:
        Inside a super-learner, all learners wait for the slowest one in each step. Between super-learners, only
        backgrounds wait, as under `adpsgd`.

    Use when:
        Nodes have several devices, and links inside a node are fast. Links between nodes are slow, or nodes differ in
        speed.

    Args:
        me: The learner that runs this coroutine.
        options: The size of a super-learner, and how super-learners average.

    References:
        Zhang et al. 2019, "A Highly Efficient Distributed Deep Learning System for Automatic Speech Recognition",
        arXiv 1907.05701.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("hadpsgd", per_node=2), learners=4).loss()
        0.01
    """
    first = me.rank - me.rank % options.per_node
    node = range(first, first + options.per_node)
    me.background.start(_average(me, options, node))
    while me.claim():
        me.step(await me.mean(me.gradient(me.snapshot()), node))
        await me.background.keep_up(options.lag)


async def _average(me: Learner, options: HierarchicalOptions, node: range) -> None:
    between = find_topology(options.pattern, me.world // len(node), me.seed)
    topology, pieces = SideBySide(between, len(node)), options.pieces(me)
    shares = [_share(piece, me.rank - node.start, len(node)) for piece in pieces]
    encoder = encoder_of(options.compression, me.weights, [share for share in shares if share.stop > share.start])
    while (k := await me.background.round(options.period)) is not None:
        mixings = (Mixing(me, topology, k, each, encoder) if each.stop > each.start else None for each in shares)
        for piece, share, mixing in zip(pieces, shares, one_ahead(mixings), strict=True):
            delta = me.weights.new_zeros(piece.stop - piece.start)
            if mixing is not None:
                delta[share.start - piece.start : share.stop - piece.start] = await mixing.delta()
            me.apply(await me.mean(delta, node) * len(node), piece)


class SideBySide(Topology):
    """A topology of super-learners, copied for each of their learners: learners mix with their counterparts.

    Its matrix is the Kronecker product of T, the matrix of the super-learners, and the identity.
    """

    def __init__(self, between: Topology, copies: int) -> None:
        super().__init__(between.world * copies)
        self._between = between
        self._copies = copies

    def sources(self, k: int, rank: int) -> Mapping[int, float]:
        node, local = divmod(rank, self._copies)
        return {self._copies * peer + local: weight for peer, weight in self._between.sources(k, node).items()}

    def targets(self, k: int, rank: int) -> Sequence[int]:
        node, local = divmod(rank, self._copies)
        return [self._copies * peer + local for peer in self._between.targets(k, node)]


def _share(piece: slice, local: int, parts: int) -> slice:
    """Part `local` of `parts` nearly equal parts of a piece."""
    size = piece.stop - piece.start
    return slice(piece.start + size * local // parts, piece.start + size * (local + 1) // parts)
