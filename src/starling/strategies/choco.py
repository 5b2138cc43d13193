"""CHOCO-SGD: neighbours send each other encoded changes of their weights."""

from pydantic import Field

from starling.learner import Learner
from starling.strategies.base import gossip
from starling.strategies.parts.mixing import (
    Differences,
    Gossip,
    MixingOptions,
    Order,
    PublicCopies,
    check_fixed_neighbours,
    kept_by,
)


class ChocoOptions(MixingOptions):
    """The options of `choco`. Its pattern must have the same neighbours in each step."""

    compression: Differences = "int8"
    """C, the encoding of changes in weights: `int8`, `int4`, or only the largest numbers (`top_k`)."""
    consensus_rate: float = Field(default=1.0, gt=0.0, le=1.0)
    """gamma, the fraction of a round's change that is applied. The coarser the encoding, the smaller it must be."""
    order: Order = "at-once"
    """Whether neighbours average while they compute their gradients (`at-once`), or after the step, as in the paper
    (`adapt-first`)."""


@gossip(
    "choco",
    "send the encoded changes of weights to neighbours at each step",
    ChocoOptions,
    check=lambda options, world: check_fixed_neighbours(options.pattern, world),
)
async def choco(me: Learner, options: ChocoOptions) -> None:
    """In each step, each learner averages with its neighbours, whose weights it knows as public copies (CHOCO-SGD).

    Equation, for all learners together::

        Q = C(W - Y),  Y <- Y + Q
        W <- W + gamma (Y T - Y) - a g(W)

    with W `[P, L]` the weights, one column for each learner; Y `[P, L]` their public copies, which neighbours know
    because they have received each Q; C the encoding; T the mixing matrix, given by `options.pattern`; gamma
    `options.consensus_rate`; a the step size of the local optimizers; g `[P, L]` the gradients, each computed at its
    own column. With `order: adapt-first`, as in the paper, W <- W - a g(W) comes first, and the last line is
    W <- W + gamma (Y T - Y); with `at-once`, the exchange takes place while gradients are computed.

    The part that C leaves out stays in W - Y, and is sent later: without gradients, all learners reach the exact mean.
    In the first step of a membership, Q is W, as float32; in the paper, Y begins at 0.

    Waits:
        Neighbours wait for each other in each step.

    Use when:
        Learners are about equally fast, and the links between them are too slow for the weights that `dpsgd` sends.
        Strong encodings need a smaller gamma, which must be tuned.

    Args:
        me: The learner that runs this coroutine.
        options: Which learners are neighbours, how changes are encoded, and which fraction of a change is applied.

    References:
        Koloskova et al. 2019, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
        Communication", arXiv 1902.00340.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("choco", compression="int4", consensus_rate=0.5), learners=4).loss()
        0.01
    """
    pieces = options.pieces(me)
    copies = PublicCopies(me.weights, pieces, options.compression, options.consensus_rate, kept_by(me))
    rounds = Gossip(me, options, copies)
    while me.claim():
        if options.order == "adapt-first":
            me.step(await me.gradient(me.weights))
            await rounds.start().change_weights()
        else:
            averaging = rounds.start()
            gradient = await me.gradient(me.weights)
            await averaging.change_weights()
            me.step(gradient)
