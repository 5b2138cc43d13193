"""Ako: partial gradient exchange, in which each learner sends a part of its accumulated steps to all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from starling.learner import Learner
from starling.strategies.base import gossip, never, one_learner
from starling.strategies.parts.background import RoundOptions

if TYPE_CHECKING:
    from torch import Tensor

DROPPED = ("k", "acc")
"""Attributes that are dropped with a membership: `known` includes a part under way, both on the learner that sent it
and on the learner at which it arrived."""


class AkoOptions(RoundOptions):
    """The options of `ako`."""

    parts: int = Field(default=4, ge=1)
    """p, the number of parts of the weights; a learner sends one part in each round."""
    combine: Literal["mean", "sum"] = "mean"
    """Whether the learners' steps are averaged, each scaled by 1/L (`mean`), or added up, as in the paper (`sum`)."""


@gossip(
    "ako",
    "step alone, and send all others a part of the steps in each round",
    AkoOptions,
    sync_group_size=one_learner,
    keeps_state=True,
    adopts_changes=never,
)
async def ako(me: Learner, options: AkoOptions) -> None:
    """Each learner steps alone, and sends the change that its steps have made to all others, one part in each round.

    Equation, for every learner l of L, with acc_l, initially 0, the change that its steps have made and that it has not
    sent, and [i] part i of p equal parts of a vector::

        each step:  w_l <- w_l - s a g_l(Phi_l),  acc_l <- acc_l - s a g_l(Phi_l)
        round k:    learner l sends acc_l[(l + k) mod p] to all others, and sets it to 0
                    each adds what it receives: w_j[i] <- w_j[i] + acc_l[i]

    with w_l the weights of learner l; a the step size of its local optimizer; g_l the gradient of its mini-batch; Phi_l
    the value of w_l when the gradient began; s = 1 if steps are added up, and 1/L if they are averaged. Each step
    reaches every learner exactly once, within p rounds. At the end, all learners send what is left.

    With p = 1, averaging, learners of equal speed, plain SGD and one round for each gradient, this is `allreduce` one
    step late: learner l computes its gradient k + 1 at weights to which its own gradients up to k and those of the
    others up to k - 1 have been applied, each with the rate a / L. Under `sparta`, learners send parts of the weights
    instead of their changes, and wait for each other; under `streaming-diloco`, they send each part once in H steps.

    In the paper, learners accumulate gradients, and the receiver multiplies them by its learning rate. Here a learner
    accumulates the steps of its own optimizer, so that momentum and Adam work as usual. With plain SGD and a constant
    learning rate, both methods are the same.

    A learner keeps its weights without acc_l as one vector. Between rounds, this vector is the same on all learners,
    unless only some of them have received the last messages of a lost learner. So each membership begins with the mean
    of this vector over the learners that have one.

    Waits:
        No learner waits for another's gradient. A learner that has computed `max_lag` gradients since its last
        completed round waits for the round under way.

    Use when:
        Learners differ in speed, and sending a gradient takes longer than computing it: in each round, a learner sends
        only 1/p of its accumulated steps. It sends to all others, so the method suits a small number of learners.

    Args:
        me: The learner that runs this coroutine.
        options: The number of parts, how the learners' steps are combined, and how often parts are sent.

    References:
        Watcharapichat, Lopez Morales, Fernandez & Pietzuch 2016, "Ako: Decentralised Deep Learning with Partial
        Gradient Exchange", ACM SoCC.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("ako", parts=2), learners=4).loss()
        0.01
    """
    known = await _what_all_know(me)
    if me.world > 1:
        me.background.start(_exchange(me, options, known))
    while me.claim():
        me.step(await me.gradient(me.snapshot()), scale=1.0 / me.world if options.combine == "mean" else 1.0)
        await me.background.keep_up(options.lag)


async def _exchange(me: Learner, options: AkoOptions, known: Tensor) -> None:
    parts, others = me.optimizer.pieces(-(-len(me.weights) // options.parts)), [*range(me.world)]
    others.remove(me.rank)
    while (k := await me.background.round(options.period)) is not None:
        parts_of = {peer: parts[(peer + k) % len(parts)] for peer in range(me.world)}
        receiving = {peer: me.receive(peer, known[parts_of[peer]], tag=k) for peer in others}
        own = parts_of[me.rank]
        acc = me.snapshot(own) - known[own]
        sending = [me.send(peer, acc, tag=k) for peer in others]
        known[own].add_(acc)
        for peer, handle in receiving.items():
            theirs = await handle
            me.apply(theirs, parts_of[peer])
            known[parts_of[peer]].add_(theirs)
        for each in sending:
            await each
    rest = me.snapshot() - known
    of_first, *_ = await _of_all(me, known)  # others differ from it by rounding
    me.replace(sum(await _of_all(me, rest), of_first))


async def _what_all_know(me: Learner) -> Tensor:
    """The weights `[P]` without this learner's unsent steps, the same on all learners when a membership begins."""
    import torch

    known = me.strategy_state("known", me.weights, of_rounds=True)
    has_begun = me.strategy_state("begun", torch.zeros(1))
    was_there = me.strategy_state("was there", torch.zeros(1), is_common=False)
    if bool(has_begun):
        of_all, are_there = await _of_all(me, known * float(was_there)), await _of_all(me, was_there)
        agreed = sum(of_all[1:], of_all[0]) / float(sum(are_there))
        me.apply(agreed - known)
        known.copy_(agreed)
    has_begun.fill_(1.0)
    was_there.fill_(1.0)
    return known


async def _of_all(me: Learner, vector: Tensor) -> list[Tensor]:
    """The vectors that all learners pass as `vector`, in rank order, so that sums of them are bit-identical."""
    exchanges = [me.exchange(peer, vector, tag=0) if peer != me.rank else None for peer in range(me.world)]
    return [vector if each is None else await each for each in exchanges]
