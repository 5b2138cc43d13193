"""Asynchronous elastic averaging: learners step alone, and they and a server's weights move towards each other."""

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
    """H, the number of steps that each learner makes between two pushes."""
    elasticity: float = Field(default=0.9, ge=0.0, le=1.0)
    """L r, with L workers; every H steps, a learner and the server move towards each other by the fraction r of their
    difference."""


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
    """Each learner steps alone, and every H steps its weights and a server's weights theta move towards each other.

    Equation, for every learner l of L, with every H-th step::

        D = r (theta - x_l),  x_l <- x_l - a g_l(x_l) + D
        server:  theta <- theta - D

    with a the step size of the local optimizer, and r = `elasticity` / L. All other steps are x_l <- x_l - a g_l(x_l).
    The changes by D cancel, so only gradients change the sum of theta and the weights of all learners.

    At the end, all learners push once more and adopt theta. A learner that begins alone has no server, and only makes
    its own steps. When a membership begins, and after a resume, a worker first repeats the push of a D that may not
    have arrived. A server applies a push only once.

    In the paper, a learner requests theta and uses it at once. Here, a learner requests theta when it begins a
    gradient, so theta travels while the gradient is computed, and may be older by one gradient.

    Waits:
        No learner waits for another. theta travels while a gradient is computed.

    Use when:
        The link is slow, learners differ in speed, and they should explore on their own. theta follows them more slowly
        than under `async-diloco`. In lockstep, the method is `easgd`.

    Args:
        me: The learner that runs this coroutine: a worker, a server, or both.
        options: How often and by how much learners and servers move towards each other, and where the servers run.

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
    sent[centre.rebuilt] = 0.0

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
