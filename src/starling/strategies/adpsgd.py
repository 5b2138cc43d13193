"""Asynchronous decentralised SGD: neighbours average in the background, and no gradient waits for another learner."""

from pydantic import Field

from starling.learner import Learner
from starling.strategies.acceleration import Accelerated, AveragingMomentum, check_acceleration
from starling.strategies.base import Strategy, one_learner
from starling.strategies.mixing import Encoder, Mixing, MixingOptions, Pattern, check_mixing, one_ahead
from starling.strategies.staleness import Staleness, StaleSteps
from starling.topology import find_topology

DROPPED = ("k", "compression")
"""A round that is under way when a membership ends is left out. The next one counts rounds from 0, and what encodings
remember begins again with it, as it does after a resume."""


class BackgroundOptions(MixingOptions):
    """The options of the strategies that average in the background."""

    pattern: Pattern = "random"
    period: float = Field(default=1.0, gt=0.0)
    """Gradients that a learner computes before it opens the next averaging round; below 1: several rounds per
    gradient."""
    max_lag: float | None = Field(default=None, ge=1.0)
    """A learner that has computed this many gradients since its last completed round waits for the round under way.
    None: twice the period, but at least 2, so that a round can always overlap with a gradient."""

    @property
    def lag(self) -> float:
        """`max_lag`, or its default."""
        return max(2.0, 2.0 * self.period) if self.max_lag is None else self.max_lag


class AsynchronousOptions(BackgroundOptions):
    """The options of `adpsgd`."""

    scale_by_staleness: bool = False
    """Divide the learning rate of a step by the staleness of its gradient, if that is above 1."""
    staleness: Staleness = "none"
    """How gradients are corrected for what averaging has changed since they were begun: `none`, `gap-aware`, or
    `delay_compensation`."""
    acceleration: Accelerated = "none"
    """How averaging is accelerated by a momentum of its own (A2CiD2), on a fixed graph: `none`, `auto`, with constants
    from the graph, or `rate` and `step`."""


async def adpsgd(me: Learner, options: AsynchronousOptions) -> None:
    """Each learner computes gradients and steps independently, while its background averages with its neighbours.

    Equation, with k counting averaging rounds::

        background:  W <- W T_k
        learner l:   w_l <- w_l - a g_l(Phi_l)

    with W `[P, L]` the weights, one column for each learner; T_k the mixing matrix of round k, given by
    `options.pattern`: for example `ring` (fixed), `random` (a ring in a new random order each round) or `pairs` (a
    random perfect matching); a the step size of the local optimizer; Phi_l the value of w_l when the gradient began. A
    round waits only for the backgrounds of neighbours; a gradient waits for no other learner.

    In the papers the background averages as fast as it can. Here `options.period` limits how often it averages, and
    `options.max_lag` how far averaging may fall behind, because convergence proofs assume a bound. A learner that has
    computed `lag` gradients since its last completed round waits, before the next gradient, for the round under way.

    With `options.staleness` or `options.scale_by_staleness`, a rule of `strategies/staleness.py` changes g_l or a, by
    how far or how often averaging has moved w_l from Phi_l. With `options.acceleration`, averaging has a momentum
    of its own, whose equation is in `strategies/acceleration.py`.

    Args:
        me: The learner that runs this coroutine.
        options: Which learners average, how often, how weights are encoded, how stale gradients are corrected, and how
            averaging is accelerated.

    References:
        Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", arXiv 1710.06952 (`pairs`).
        Zhang et al. 2019, "Distributed Deep Learning Strategies for Automatic Speech Recognition", arXiv 1904.04956
        (`ring`).
        Zhang et al. 2020, "Improving Efficiency in Large-Scale Decentralized Distributed Training", arXiv 2002.01119
        (`random`).
        Nabli et al. 2023, "A2CiD2: Accelerating Asynchronous Communication in Decentralized Deep Learning",
        arXiv 2306.08289 (`acceleration`).
    """
    stale = StaleSteps(me, options.staleness, options.scale_by_staleness)
    momentum = AveragingMomentum(me, options.acceleration, options.pattern)
    me.background(_average(me, options, momentum))
    while me.claim():
        stale.step(await me.gradient(stale.snapshot()))
        await me.keep_up(options.lag)


async def _average(me: Learner, options: AsynchronousOptions, momentum: AveragingMomentum) -> None:
    topology, pieces = find_topology(options.pattern, me.world, me.seed), options.pieces(me)
    compression = Encoder(options, me.weights, pieces)
    while (k := await me.round(options.period)) is not None:
        for piece, mixing in one_ahead((piece, Mixing(me, topology, k, piece, compression)) for piece in pieces):
            me.apply(momentum.change(await mixing.delta(), piece), piece)


def _check(options: AsynchronousOptions, world: int) -> None:
    check_mixing(options, world)
    check_acceleration(options.acceleration, options.compression, options.pattern, world)


ADPSGD = Strategy(
    "adpsgd",
    "average with neighbours in the background",
    adpsgd,
    one_learner,
    AsynchronousOptions,
    check=_check,
    kind="gossip",
)
