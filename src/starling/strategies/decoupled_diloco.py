"""Decoupled DiLoCo: a syncer merges fragments of the weights as soon as enough learners have sent them."""

from __future__ import annotations

from contextlib import suppress

from pydantic import Field

from starling.configuration import Config
from starling.errors import ConfigError
from starling.learner import Learner, LoopEnded
from starling.strategies.base import Strategy, never, one_learner, registered
from starling.strategies.parts.means import Encoded


class DecoupledOptions(Config):
    """The options of `decoupled-diloco`."""

    every: int = Field(default=100, ge=1)
    """H, the number of steps in which a learner pushes each fragment once."""
    rate: float = Field(default=0.7, gt=0.0)
    """eta, the rate of the outer optimizer."""
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
    """beta, the momentum of the outer optimizer."""
    fragments: int = Field(default=4, ge=1)
    """P, the number of fragments; each learner pushes its fragments one after another, H / P steps apart."""
    overlap: int = Field(default=5, ge=0)
    """tau, the number of steps that a learner makes before it needs the merged fragment; at most H / P."""
    quorum: int | None = Field(default=None, ge=1)
    """K, the number of learners whose pushes a merge needs; null: half of the learners, rounded up."""
    compression: Encoded = "none"
    """C, the encoding of what learners push; theta is sent in float32."""

    def needed(self, world: int) -> int:
        """Return K, the number of pushes that a merge needs: by default half of the learners, at most all of them."""
        return min(self.quorum or -(-world // 2), world)


def _check(options: DecoupledOptions, world: int) -> None:
    if options.fragments > options.every:
        raise ConfigError(
            f"strategy.fragments: a learner cannot push {options.fragments} fragments one after another in "
            f"{options.every} steps; set at most `every`"
        )
    if options.overlap > options.every // options.fragments:
        raise ConfigError(
            f"strategy.overlap: a fragment would still be under way after {options.overlap} steps when the next one "
            f"departs, {options.every // options.fragments} steps later; set at most that"
        )


class SyncedStrategy(Strategy):
    """A strategy with a syncer that keeps the model. If the syncer is lost, another learner becomes the syncer."""

    is_served = True


@registered(
    "decoupled-diloco",
    "like streaming-diloco, but a fragment waits for a quorum only",
    DecoupledOptions,
    kind="periodic",
    sync_group_size=one_learner,
    check=_check,
    adopts_changes=never,
    of=SyncedStrategy,
)
async def decoupled_diloco(me: Learner, options: DecoupledOptions) -> None:
    """Each learner steps alone, and a syncer merges each fragment of the weights once K learners have pushed it.

    Equation, for every learner l of L and fragment p of P, with theta_l the theta that the learner received last, and
    n_l the number of its steps since it last pushed p::

        each step:            x_l <- x_l - a g_l(x_l)
        every H/P-th step:    push D_l = C(theta_(l,p) - x_(l,p)), for the p that was merged least often
                              s <- theta_(l,p) - D_l
        tau steps later:      ask for theta_p;  x_(l,p) <- theta_p + x_(l,p) - s;  theta_(l,p) <- theta_p

        syncer, once K have pushed p, and one of these asks for it:
                              D = sum_l n_l D_l / sum_l n_l       over all that have pushed p since the last merge
                              v_p <- beta v_p + D
                              theta_p <- theta_p - eta (D + beta v_p)

    with a the step size of the local optimizer, whose state stays with the learner; eta, beta, K and tau the options
    `rate`, `momentum`, `quorum` and `overlap`; v initially 0; C the encoding, by default none. The error of an encoding
    stays in x_l, so the next push of the fragment contains it. A learner that asks for a fragment waits only if no
    merge has happened since it received that fragment last. A push that comes too late for a merge is part of the next
    one. If as many learners have pushed again when the late learner asks, this merge happens at once, so that a learner
    that was late once does not stay behind. The time between the K-th push and the first request is the grace window:
    it needs no clock, and it ends when waiting would cost a learner time. At the end, all learners push their remaining
    steps, which are merged together, and adopt theta.

    The syncer is learner 0, which also computes gradients. A checkpoint contains theta and v. If the syncer is lost,
    the next learner becomes the syncer: all learners continue with the mean of their weights, so the other learners
    lose no steps, and v is reset to 0. In the paper, the syncer is a separate replicated service, and the grace
    window follows from measured times.

    Waits:
        A learner that has pushed a fragment waits, tau steps later, until K - 1 others have pushed it, too.

    Use when:
        Machines stall, fail or differ in speed, and the links between them are slow. If machines are alike and do not
        fail, use `streaming-diloco`, under which no push is late.

    Args:
        me: The learner that runs this coroutine.
        options: How often learners push, what a merge needs, and the outer optimizer.

    References:
        Douillard et al. 2026, "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv 2604.21428.

    Example:
        >>> from starling.toy import regression
        >>> job = regression("decoupled-diloco", every=4, fragments=2, overlap=1)
        >>> starling.simulate(job, learners=4).loss()
        0.32
    """
    from starling.strategies.parts.means import find_encoding
    from starling.strategies.parts.syncer import Fragments

    pieces = me.optimizer.pieces(-(-len(me.weights) // options.fragments))
    fragments = Fragments(me, pieces, find_encoding(options.compression))
    if me.world == 1 and not fragments.have_been_received:
        while me.claim():
            me.step(await me.gradient(me.weights))
        return
    await fragments.begin(options.needed(me.world), options.rate, options.momentum)
    period = options.every // options.fragments
    with suppress(LoopEnded):
        while me.claim():
            me.step(await me.gradient(me.weights))
            await fragments.step(period, options.overlap)
    await fragments.leave()
