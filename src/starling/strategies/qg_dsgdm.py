"""QG-DSGDm: averaging with neighbours, and a momentum that follows the averaged model."""

from pydantic import Field

from starling.learner import Learner, divided
from starling.strategies.base import gossip
from starling.strategies.parts.mixing import Gossip, RoundedOptions, check_mixing, rounding


class QgDsgdmOptions(RoundedOptions):
    """The options of `qg-dsgdm`."""

    beta: float = Field(default=0.9, ge=0.0, lt=1.0)
    """beta, the factor of the quasi-global momentum in a step."""
    mu: float = Field(default=0.1, gt=0.0, le=1.0)
    """mu, the share of the newest change in the quasi-global momentum; it is 1 minus the paper's mu."""


@gossip(
    "qg-dsgdm",
    "average with neighbours after each step, with a momentum of the averaged model",
    QgDsgdmOptions,
    check=check_mixing,
)
async def qg_dsgdm(me: Learner, options: QgDsgdmOptions) -> None:
    """A learner's momentum follows the change that its step and averaging with neighbours together make to its weights.

    Equation, for all learners together::

        X' = (X - a (beta M + g(X))) T_k
        M <- (1 - mu) M + mu (X - X') / a

    with X `[P, L]` the weights, one column for each learner, and X' the weights after step and averaging; M `[P, L]`
    the momenta, initially 0; T_k the mixing matrix of step k, given by `options.pattern`; a the learning rate;
    g `[P, L]` the gradients, each computed at its own column. With beta = 0, this is `dpsgd` with
    `order: adapt-first`.

    The paper's mu is 1 minus the mu used here. On Starling's own engines, a is measured in units of its peak, and M in
    units of 1 / peak, so a M is the same. Clipping limits only g. A gradient that is not finite counts as 0.

    Waits:
        In each step, neighbours wait for each other after they have computed their gradients.

    Use when:
        Learners have different data, and you want momentum: the momentum of a local optimizer would follow the data of
        its learner. The local optimizer should have no momentum.

    Args:
        me: The learner that runs this coroutine.
        options: Which learners are neighbours, the constants of the momentum, and how weights are rounded for sending.

    References:
        Lin et al. 2021, "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous Data",
        arXiv 2102.04761.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("qg-dsgdm", beta=0.5), learners=4).loss()
        0.03
    """
    rounds = Gossip(me, options, rounding(me, options))
    m = me.strategy_state("momentum", me.weights.new_zeros(len(me.weights)), is_common=False)
    while me.claim():
        gradient = await me.gradient(me.weights)
        x, a = me.weights.clone(), me.optimizer.learning_rate()
        me.step(gradient)
        me.apply(-a * options.beta * m)
        await rounds.start().change_weights()
        m.lerp_(divided(x - me.weights, a, at_rest=m), options.mu)
