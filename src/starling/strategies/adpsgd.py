"""Asynchronous decentralised SGD: neighbours average in the background, gradients wait for nobody."""

from pydantic import Field

from starling.learner import Learner
from starling.strategies.mixing import Mixing, MixingOptions, Wire, one_ahead
from starling.topology import find_topology


class AsynchronousOptions(MixingOptions):
    """The options of the strategies that average in the background."""

    pattern: str = "random"
    period: float = Field(default=1.0, gt=0.0)
    """Gradients that a learner makes before it opens the next averaging round; below 1, several rounds a gradient."""
    max_lag: float | None = Field(default=None, ge=1.0)
    """Gradients after which a learner waits for its own background to complete a round; None: twice the period, but at
    least 2, so that a round always has a gradient to hide behind."""

    @property
    def lag(self) -> float:
        """`max_lag`, or what it is by default."""
        return max(2.0, 2.0 * self.period) if self.max_lag is None else self.max_lag


async def adpsgd(me: Learner, options: AsynchronousOptions) -> None:
    """Each learner takes gradients and steps on its own, while its background averages with its neighbours.

    Equation, with k counting averaging rounds::

        background:  W <- W T_k
        learner l:   w_l <- w_l - a g_l(Phi_l)

    with W `[P, L]` the weights, one column a learner; T_k the mixing matrix of round k by `options.pattern`: `ring`
    (fixed), `random` (a ring of newly permuted learners each round) or `pairs` (a random perfect matching), among
    others; a the step of the local optimizer; Phi_l what w_l was when the gradient began. Rounds wait for the
    backgrounds of neighbours only. A gradient waits for no other learner; but one that would be the `options.lag`-th
    since the learner last completed a round waits for that learner's own background, because convergence proofs assume
    a bound.

    Sources: Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", arXiv 1710.06952
    (pairs); Zhang et al. 2019, arXiv 1904.04956 (ring); Zhang et al. 2020, arXiv 2002.01119 (random). There the
    background averages as fast as it can; here `options.period` bounds it.
    """
    me.background(_average(me, options))
    while me.claim():
        me.step(await me.gradient(me.snapshot()))
        await me.keep_up(options.lag)


async def _average(me: Learner, options: AsynchronousOptions) -> None:
    topology, pieces = find_topology(options.pattern, me.world, me.seed), options.pieces(me)
    wire = Wire(options, me.weights, pieces)
    while (k := await me.round(options.period)) is not None:
        for piece, mixing in one_ahead((piece, Mixing(me, topology, k, piece, wire)) for piece in pieces):
            me.apply(await mixing.delta(), piece)
