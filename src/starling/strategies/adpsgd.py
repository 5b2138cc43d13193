"""AD-PSGD: neighbours average in the background, and no gradient waits for another learner."""

from collections.abc import Mapping
from typing import ClassVar

from starling.learner import Learner
from starling.strategies.base import gossip, one_learner
from starling.strategies.parts.background import StaleOptions, average_in_rounds, check_background
from starling.strategies.parts.staleness import StaleSteps


class AsynchronousOptions(StaleOptions):
    """The options of `adpsgd`: `pattern` (by default `random`), `period`, `max_lag`, `compression`, `staleness`,
    `scale_by_staleness`, `optimizer_state` and `piece_megabytes`."""

    MOVED: ClassVar[Mapping[str, str]] = {
        **StaleOptions.MOVED,
        "acceleration": "A2CiD2 is a strategy of its own: write `name: a2cid2`",
    }


@gossip(
    "adpsgd",
    "average with neighbours in the background",
    AsynchronousOptions,
    sync_group_size=one_learner,
    check=check_background,
)
async def adpsgd(me: Learner, options: AsynchronousOptions) -> None:
    """Each learner computes gradients and makes steps independently, while its background averages with its neighbours.

    Equation, with k counting averaging rounds::

        background:  W <- W T_k, as w_l <- w_l + sum_j T_jl (w_j - w_l)
        learner l:   w_l <- w_l - a g_l(Phi_l)

    with W `[P, L]` the weights, one column for each learner, w_l; the sum uses the weights that were sent when the
    round began, so that a step that is made meanwhile is not lost; T_k the mixing matrix of round k, given by
    `options.pattern`: for example `ring` (fixed), `random` (a ring in a new random order each round) or `pairs` (a
    random perfect matching); a the step size of the local optimizer; Phi_l the value of w_l when the gradient began.

    In the papers, the background averages as fast as it can. Here, `options.period` limits how often it averages, and
    `options.max_lag` limits how far averaging may fall behind, because convergence proofs assume a bound. A learner
    that has computed `max_lag` gradients since its last completed round waits for the round under way before it
    computes the next gradient.

    With `options.staleness` or `options.scale_by_staleness`, a rule of `strategies/parts/staleness.py` changes g_l or a
    according to how far or how often averaging has moved w_l from Phi_l.

    Waits:
        A learner waits for no other's gradient. A round waits for the backgrounds of neighbours. A learner that is
        `max_lag` gradients ahead waits for its own round under way.

    Use when:
        Learners differ in speed, or stall. If learners are alike and links are fast, each gradient is worth more under
        `allreduce`.

    Args:
        me: The learner that runs this coroutine.
        options: Which learners average, how often, how weights are encoded, and how stale gradients are corrected.

    References:
        Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", arXiv 1710.06952 (`pairs`).
        Zhang et al. 2019, "Distributed Deep Learning Strategies for Automatic Speech Recognition", arXiv 1904.04956
        (`ring`).
        Zhang et al. 2020, "Improving Efficiency in Large-Scale Decentralized Distributed Training", arXiv 2002.01119
        (`random`).

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("adpsgd", pattern="pairs"), learners=4).loss()
        0.01
    """
    stale = StaleSteps(me, options.staleness, options.scale_by_staleness)
    me.background.start(average_in_rounds(me, options))
    while me.claim():
        stale.step(await me.gradient(stale.snapshot()))
        await me.background.keep_up(options.lag)
