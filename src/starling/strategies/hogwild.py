"""Lock-free SGD: all learners share one model in the memory of one machine."""

from contextlib import suppress

from pydantic import Field

from starling.configuration import Config
from starling.learner import Learner, LoopEnded
from starling.strategies.base import never, one_learner, registered
from starling.strategies.parts.staleness import rate_scale


class HogwildOptions(Config):
    """The options of `hogwild`."""

    piece_megabytes: float = Field(default=16.0, gt=0.0)
    """Maximum size of the pieces in which the model is read and changed. On the virtual engine, other learners may read
    or change the model only between two pieces; on the processes engine, at any time."""
    scale_by_staleness: bool = False
    """Whether to divide the learning rate of a step on a piece by the gradient's staleness on this piece, if that is
    above 1."""


@registered(
    "hogwild",
    "change one shared model without a lock",
    HogwildOptions,
    kind="shared memory",
    sync_group_size=one_learner,
    adopts_changes=never,
    steps_itself=False,
)
async def hogwild(me: Learner, options: HogwildOptions) -> None:
    """Every learner reads and changes one shared model, without a lock and without waiting for another learner.

    Equation, for every learner, repeatedly::

        w <- w - a g(Phi)

    with w the shared weights; a the step size of the learner's own optimizer; g the gradient of its mini-batch; Phi its
    copy of w. A learner reads w piece by piece while others change it, so parts of Phi may be of different ages. A step
    may overwrite another learner's simultaneous step: such lost updates are rare and are accepted.

    In the paper, gradients are sparse and steps are those of plain SGD; this strategy requires neither.

    Waits:
        No learner waits for another, except once at the end.

    Use when:
        All learners are processes of one user on one Linux machine, and differ in speed. Each learner reads and changes
        the whole model for each gradient. If this takes long compared with the gradient, use `adpsgd`.

    Args:
        me: The learner that runs this coroutine.
        options: The size of the pieces in which the model is read and changed.

    References:
        Niu et al. 2011, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", arXiv 1106.5730
        (Algorithm 1).

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("hogwild"), learners=4).loss()
        0.01
    """
    largest = max(1, int(options.piece_megabytes * 2**20) // me.weights.element_size())
    shared = await me.shards.share(me.optimizer.pieces(largest))
    with suppress(LoopEnded):
        while me.claim():
            read_at = [part.num_steps for part in shared]
            for part in shared:
                me.replace(await part.read(), part.piece)
            gradient = me.optimizer.clip(await me.gradient(me.weights))
            if gradient is None:
                continue
            gradient = gradient.cpu()
            for part, when in zip(shared, read_at, strict=True):
                scale = rate_scale(part.num_steps - when) if options.scale_by_staleness else 1.0
                await part.step(gradient[part.piece], me.optimizer.step_metadata, [when], scale)
    for peer in range(me.world):  # wait until every learner has made its last step
        if peer != me.rank:
            await me.exchange(peer, me.optimizer.step_metadata, tag=0)
    for part in shared:
        me.replace(await part.read(), part.piece)
