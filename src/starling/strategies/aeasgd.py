"""Asynchronous elastic averaging: learners step alone, and they and a server's weights draw each other closer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from starling.learner import Learner, LoopEnded
from starling.strategies.base import never, one_learner, registered
from starling.strategies.parts.remote import connected
from starling.strategies.parts.rules import Served, ServedStrategy

if TYPE_CHECKING:
    from torch import Tensor

_NO_OPTIMIZER = "the server of `aeasgd` adds what it gets: for an optimizer on the server, write `name: async-diloco`"


class AeasgdOptions(Served):
    """The options of `aeasgd`."""

    MOVED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("rate", "momentum", "delay", "spread"), _NO_OPTIMIZER),
        "by_speed": "each learner of `aeasgd` makes `every` steps: for steps by speed, write `name: async-diloco`",
    }

    every: int = Field(default=10, ge=1)
    """H, the steps of each learner from one push to the next."""
    elasticity: float = Field(default=0.9, ge=0.0, le=1.0)
    """L r: every H steps, a learner and the server draw each other closer by r of their difference, with L workers."""


@registered(
    "aeasgd",
    "step alone, with an elastic tie to a server's weights; no learner waits",
    AeasgdOptions,
    kind="periodic",
    sync_group_size=one_learner,
    adopts_changes=never,
    of=ServedStrategy,
)
async def aeasgd(me: Learner, options: AeasgdOptions) -> None:
    """Each learner steps alone, and every H steps it and a server's weights theta draw each other closer.

    Equation, for every learner l of L, with every H-th step::

        D = r (theta - x_l),  x_l <- x_l - a g_l(x_l) + D
        server:  theta <- theta - D

    with a the step size of the local optimizer, and r = `elasticity` / L. All other steps are x_l <- x_l - a g_l(x_l).
    What learners and theta give each other adds up to nothing: their sum moves by the gradients alone.

    At the end all learners push once more and take theta. A learner that begins alone has no server, and its steps are
    all there is. When a membership begins, and after a resume, a worker first pushes again the D that may not have
    arrived. A server takes a push only once.

    In the paper a learner asks for theta and answers at once. Here it asks when its gradient begins, so that theta
    travels while the gradient is computed, and theta may be older by one gradient.

    Waits:
        No learner waits for another. theta travels while a gradient is computed.

    Use when:
        The link is slow, learners differ in speed, and they should explore on their own. theta follows them more slowly
        than under `async-diloco`. In lockstep it is `easgd`.

    Args:
        me: The learner that runs this coroutine: a worker, a server, or both.
        options: How often and how strongly they draw each other closer, and where the servers run.

    References:
        Zhang, Choromanska & LeCun 2015, "Deep learning with Elastic Averaging SGD", arXiv 1412.6651 (Algorithm 1;
        `elasticity` is its beta, r its alpha, H its tau).

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("aeasgd", every=4), learners=4).loss()
        0.015
    """
    if (centre := await connected(me, options)) is None:
        return
    r = options.elasticity / len(options.workers(me.world))
    sent = me.strategy_state("sent", me.weights.new_zeros(len(me.weights)), is_common=False)

    async def draw(difference: Tensor) -> None:
        me.apply(difference)
        sent.copy_(difference)
        await centre.push(difference)

    if centre.num_unconfirmed:
        await centre.push_again(sent)
    with suppress(LoopEnded):
        while me.claim():
            is_due = centre.num_steps >= options.every
            if is_due:
                centre.ask()
            gradient = await me.gradient(me.weights)
            difference = r * (await centre.answer() - me.weights) if is_due else None
            me.step(gradient)
            if difference is not None:
                await draw(difference)
            centre.count_step()
    if centre.num_steps:
        await centre.answer()  # a loop may end between a request and its answer, which is older than the next one
        await draw(r * (await centre.pull() - me.weights))
    me.replace(await centre.leave())
