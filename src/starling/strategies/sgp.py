"""Push-sum: averaging on directed graphs, on which a learner may send and receive different amounts of weight."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from starling.configuration import Config
from starling.learner import Handle, Learner, LoopEnded
from starling.strategies.base import gossip
from starling.strategies.parts.mixing import Pattern, kept_by
from starling.topology import find_topology

if TYPE_CHECKING:
    from torch import Tensor


class PushSumOptions(Config):
    """The options of `sgp`."""

    pattern: Pattern = "exponential"
    """The pattern, which says to which learners each learner sends: a name in `topology.PATTERNS`, a pattern of an
    installed package, or `module:name`. The shares need not balance, but the shares that a learner gives to others must
    sum to less than 1."""
    overlap: bool = False
    """Whether messages travel while the next gradient is computed (OSGP)."""


def _check(options: PushSumOptions, world: int) -> None:
    find_topology(options.pattern, world, seed=0, is_balanced=False)


@gossip("sgp", "average with neighbours on a directed graph at each step", PushSumOptions, check=_check)
async def sgp(me: Learner, options: PushSumOptions) -> None:
    """Each learner sends shares of its weights and of its push-sum weight along a directed graph (push-sum).

    Equation, for learner l, with z_l its model and u_l, initially 1, the push-sum weight::

        z_l = x_l / u_l
        x_l <- x_l - a g_l(z_l)
        x_l <- sum_j p_lj x_j,  u_l <- sum_j p_lj u_j

    with p_lj the share of its x and u that learner j gives to l, and p_ll the share that l keeps; the shares of each j
    sum to 1. So the sums of all x_l and of all u_l stay the same on any graph, and without gradients all z_l reach the
    mean of the initial x_l. If averaging conserves the mean of all weights (a doubly stochastic matrix), u_l stays 1,
    and this is `dpsgd` with `order: adapt-first`. a is the step size of the local optimizer, and g_l the gradient of
    learner l's mini-batch.

    With `overlap`, messages sent in step k are added at the end of step k + 1, before the messages of step k + 1 are
    sent::

        x_l <- x_l - a g_l(z_l) + sum_(j /= l) p_lj x_j,  then x_l <- p_ll x_l

    with x_j as it was sent; u_l changes in the same way. The last messages are added after the last step.

    The learner's weights are z_l. A membership begins with u_l = 1. So messages that were under way when the previous
    membership ended are dropped together with the push-sum weights, and each learner continues with its z_l.

    Waits:
        In each step, a learner waits for the messages of its sources after its gradient. With `overlap`, it waits only
        for messages that take longer than a gradient.

    Use when:
        Not all links work in both directions, or a learner should send only half as many bytes as on a ring. If
        neighbours exchange weights, use `dpsgd`, which needs no push-sum weights.

    Args:
        me: The learner that runs this coroutine.
        options: The graph, and whether messages overlap with gradients.

    References:
        Assran et al. 2019, "Stochastic Gradient Push for Distributed Deep Learning", arXiv 1811.10792.
        Kempe et al. 2003, "Gossip-Based Computation of Aggregate Information", FOCS (push-sum).

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("sgp"), learners=4).loss()
        0.01
    """
    push = Push(me, options)
    with suppress(LoopEnded):
        while me.claim():
            push.step(await me.gradient(me.weights))
            if options.overlap:
                await push.receive()
                push.send()
            else:
                push.send()
                await push.receive()
    await push.receive()


class Push:
    """A learner's part in push-sum: u, the number of rounds, and the messages under way."""

    def __init__(self, me: Learner, options: PushSumOptions) -> None:
        import torch

        keep = kept_by(me)
        self._me, self._has_overlap = me, options.overlap
        self._topology = find_topology(options.pattern, me.world, me.seed, is_balanced=False)
        (self._whole,) = me.optimizer.pieces(len(me.weights))
        self._u = keep("push-sum weight", torch.ones(1, dtype=torch.float64))
        self._k = keep("rounds", torch.zeros(1, dtype=torch.int64))
        self._receiving: list[tuple[float, Handle[Tensor], Handle[Tensor]]] = []
        self._sending: list[Handle[None]] = []
        if options.overlap:
            self._sent_x = keep("sent", me.weights)
            self._sent_u = keep("sent weight", torch.zeros_like(self._u))  # 0 unless messages are under way
            if float(self._sent_u):  # they were when the checkpoint was saved: send them again
                self._start(int(self._k) - 1, self._sent_x.clone(), self._sent_u.clone())

    def step(self, gradient: Tensor) -> None:
        """Make a step on x, with a gradient computed at z."""
        me, u = self._me, float(self._u)
        me.replace(u * me.weights)
        me.step(gradient, me.version)
        me.replace(me.weights / u)

    def send(self) -> None:
        """Send x and u to the targets of this round. z stays the same, because this learner keeps equal shares of x and
        u."""
        k = int(self._k)
        x, u = self._me.snapshot(self._whole).mul_(float(self._u)), self._u.clone()
        if self._has_overlap:
            self._sent_x.copy_(x)
            self._sent_u.copy_(u)
        self._start(k, x, u)
        self._u.mul_(self._topology.kept(k, self._me.rank))
        self._k.add_(1)

    def _start(self, k: int, x: Tensor, u: Tensor) -> None:
        me = self._me
        self._receiving = [
            (share, me.receive(peer, x, tag=k), me.receive(peer, u, tag=k))
            for peer, share in self._topology.sources(k, me.rank).items()
        ]
        self._sending = [me.send(peer, each, tag=k) for peer in self._topology.targets(k, me.rank) for each in (x, u)]

    async def receive(self) -> None:
        """Wait for the messages under way, and add them."""
        me, receiving, sending = self._me, self._receiving, self._sending
        self._receiving, self._sending = [], []
        if receiving:
            x, u = float(self._u) * me.weights, self._u.clone()
            for share, of_x, of_u in receiving:
                x.add_(await of_x, alpha=share)
                u.add_(await of_u, alpha=share)
            self._u.copy_(u)
            me.replace(x.div_(float(u)))
        for each in sending:
            await each
        if self._has_overlap:
            self._sent_u.zero_()
