"""D-PSGD: averaging with neighbours at every step."""

from collections.abc import Mapping
from typing import ClassVar

from starling.learner import Learner
from starling.strategies.base import gossip
from starling.strategies.parts.mixing import Gossip, Order, RoundedOptions, check_mixing, rounding

_QUASI_GLOBAL = "quasi-global momentum is a strategy of its own: write `name: qg-dsgdm`"


class DpsgdOptions(RoundedOptions):
    """The options of `dpsgd`: also `pattern`, `compression`, `optimizer_state` and `piece_megabytes`."""

    MOVED: ClassVar[Mapping[str, str]] = {
        "mean_every": "Gossip-PGA is a strategy of its own: write `name: gossip-pga` with `every`",
        "momentum": _QUASI_GLOBAL,
        "beta": _QUASI_GLOBAL,
        "mu": _QUASI_GLOBAL,
        "correction": "D2 and gradient tracking are strategies of their own: write `name: d2` or "
        "`name: gradient-tracking`",
        "consensus_rate": "CHOCO is a strategy of its own: write `name: choco`",
    }
    order: Order = "at-once"
    """Whether neighbours average while they compute their gradients (`at-once`), or after the step (`adapt-first`)."""


@gossip("dpsgd", "average with neighbours at each step", DpsgdOptions, check=check_mixing)
async def dpsgd(me: Learner, options: DpsgdOptions) -> None:
    """In each step, each learner averages its weights with those of its neighbours (D-PSGD).

    Equation, for all learners together::

        W <- W T_k - a g(W)           (order: at-once)
        W <- (W - a g(W)) T_k         (order: adapt-first)

    with W `[P, L]` the weights, one column for each learner; T_k the mixing matrix of step k, given by
    `options.pattern`; a the step size of the local optimizers; g `[P, L]` the gradients, each computed at its own
    column.

    Waits:
        Neighbours wait for each other in each step. With `at-once`, they average while they compute their gradients.

    Use when:
        There are many learners of equal speed, and a mean over all of them would take longer than a gradient. If
        learners differ in speed, use `adpsgd`.

    Args:
        me: The learner that runs this coroutine.
        options: Which learners are neighbours, when they average, and how weights are rounded for sending.

    References:
        Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for
        Decentralized Parallel Stochastic Gradient Descent", arXiv 1705.09056 (`at-once`).
        Koloskova et al. 2020, "A Unified Theory of Decentralized SGD with Changing Topology and Local Updates",
        arXiv 2003.10422 (`adapt-first`).

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("dpsgd", pattern="ring"), learners=4).loss()
        0.01
    """
    rounds = Gossip(me, options, rounding(me, options))
    while me.claim():
        if options.order == "adapt-first":
            me.step(await me.gradient(me.weights))
            await rounds.start().change_weights()
        else:
            averaging = rounds.start()
            gradient = await me.gradient(me.weights)
            await averaging.change_weights()
            me.step(gradient)
