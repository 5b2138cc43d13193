"""Streaming DiLoCo: DiLoCo in which fragments of the weights are averaged in turn, during the next steps."""

from pydantic import Field

from starling.configuration import Config
from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies.base import never, periodic
from starling.strategies.parts.local_steps import LocalSteps, Travelling
from starling.strategies.parts.means import Encoded, Means
from starling.strategies.parts.outer import Outer


class StreamingOptions(Config):
    """The options of `streaming-diloco`."""

    every: int = Field(default=100, ge=1)
    """H, the number of steps that each learner makes between two agreements on the same fragment."""
    rate: float = Field(default=0.4, gt=0.0)
    """eta, the rate of the outer optimizer."""
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
    """beta, the momentum of the outer optimizer."""
    fragments: int = Field(default=4, ge=1)
    """P, the number of fragments; learners agree on one after another, H / P steps apart."""
    overlap: int = Field(default=5, ge=0)
    """tau, the number of steps that a learner makes while a fragment is averaged; at most H / P."""
    blend: float = Field(default=0.5, ge=0.0, lt=1.0)
    """alpha, the share of a learner's own weights in its weights after an agreement."""
    compression: Encoded = "none"
    """How the difference from the last agreement is encoded for sending; errors are fed back."""


def _check(options: StreamingOptions, world: int) -> None:
    if options.fragments > options.every:
        raise ConfigError(
            f"strategy.fragments: {options.fragments} fragments cannot agree in turn within {options.every} steps; "
            "set at most `every`"
        )
    if options.overlap > options.every // options.fragments:
        raise ConfigError(
            f"strategy.overlap: a fragment would still be averaged after {options.overlap} steps when the next one "
            f"begins, {options.every // options.fragments} steps later; set at most that"
        )


@periodic(
    "streaming-diloco",
    "like diloco, but average one fragment of the weights after another, in the background",
    StreamingOptions,
    check=_check,
    adopts_changes=never,
)
async def streaming_diloco(me: Learner, options: StreamingOptions) -> None:
    """Each learner steps alone, and agrees as in DiLoCo on one fragment after another while it continues to compute.

    Equation, for fragment p of P, which departs at steps p H / P, p H / P + H, …, with theta the weights last agreed on
    and v the outer momentum, initially 0::

        each step:           x_l <- x_l - a g_l(x_l)
        p departs:           D = theta_p - (1/L) sum_l x_(l,p)
        tau steps later:     v_p <- beta v_p + D
                             theta_p <- theta_p - eta (D + beta v_p)
                             x_(l,p) <- alpha x_(l,p) + (1 - alpha) theta_p

    with x_l the weights of learner l; a the step size of its local optimizer, whose state stays with the learner; g_l
    the gradient of its mini-batch. At the end, all learners agree on all fragments, with alpha = 0.

    Here, each fragment consists of consecutive weights. In the paper, fragments consist of layers, and D is sent in 4
    bits (`compression: int4`).

    Waits:
        A learner waits for a fragment only if its mean takes longer than tau steps, or if another learner is tau steps
        behind.

    Use when:
        Links are so slow that learners wait long at each agreement under `diloco`. The peak bandwidth is P times lower,
        and communication overlaps with computation.

    Args:
        me: The learner that runs this coroutine.
        options: How often learners agree, on how many fragments, and how.

    References:
        Douillard et al. 2025, "Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch",
        arXiv 2501.18512.

    Example:
        >>> from starling.toy import regression
        >>> job = regression("streaming-diloco", every=4, fragments=2, overlap=1)
        >>> starling.simulate(job, learners=4).loss()
        0.31
    """
    steps = LocalSteps(me, every=1)
    travelling = Travelling(me, options.fragments, options.every, options.overlap)
    means = Means(me, options.compression, travelling.fragments)
    outer = Outer(me, means, options.rate, options.momentum, nesterov=True)

    async def merge(num_steps: int | None = None) -> None:
        if (arrival := await travelling.arrival(num_steps)) is not None:
            fragment, mean = arrival
            theta = outer.step(mean, fragment)
            alpha = options.blend
            me.replace(alpha * me.snapshot(fragment) + (1.0 - alpha) * theta if alpha else theta, fragment)

    if options.overlap:  # what was under way begins again
        travelling.depart(steps.num, outer.mean)
    while await steps.alone():
        await merge(steps.num)
        travelling.depart(steps.num, outer.mean)
        if options.overlap == 0:
            await merge()
    await merge()
    for fragment in travelling.fragments if steps.num else ():
        me.replace(outer.step(await outer.mean(fragment), fragment), fragment)
