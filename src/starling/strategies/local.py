"""Periodic averaging: learners step alone, and agree every H steps through an outer optimizer."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from starling.configuration import Config
from starling.errors import ConfigError
from starling.learner import Learner, LoopEnded, divided
from starling.strategies.base import Strategy
from starling.strategies.compression import Compression, LowRank, Means, TopK
from starling.topology import pairs

if TYPE_CHECKING:
    from torch import Tensor


class LocalOptions(Config):
    """The options of the strategies that agree every H steps."""

    every: int = Field(default=8, ge=1)
    """H, the steps of each learner from one agreement to the next."""
    warm_up: int = Field(default=0, ge=0)
    """The steps before the first period, in which learners step with the mean gradient, as under `allreduce`."""
    rate: float = Field(default=1.0, gt=0.0)
    """eta, the rate of the outer optimizer."""
    momentum: float | None = Field(default=0.0, ge=0.0, lt=1.0)
    """beta, the momentum of the outer optimizer; None: 1 - 1/L."""
    nesterov: bool = False
    """Whether the outer momentum is Nesterov's; otherwise it is the classical one."""
    divided_by_rate: bool = False
    """Whether the outer momentum accumulates D / a, with a the current learning rate, as SlowMo does."""
    optimizer_state: Literal["local", "averaged", "reset"] = "local"
    """What an agreement does to momentum and Adam's moments of the learners: nothing, average them, or zero them."""
    fragments: int = Field(default=1, ge=1)
    """P, the parts of the weights that agree in turn, H / P steps apart."""
    overlap: int = Field(default=0, ge=0)
    """tau, the steps that a learner makes while a fragment is being averaged."""
    blend: float = Field(default=0.0, ge=0.0, lt=1.0)
    """alpha, the share of its own weights that a learner keeps at an agreement."""
    elastic: bool = False
    """Whether learners keep weights of their own, which theta draws closer by eta / L of the difference."""
    share: float = Field(default=1.0, gt=0.0, le=1.0)
    """The share of the weights that agree at an agreement, chosen at random each time."""
    compression: Compression = "none"
    """How theta - x_l is encoded for sending, or a gradient while warming up; errors are fed back."""
    among: Literal["all", "pairs"] = "all"
    """With whom a learner agrees: with all, or with one other, drawn at random for each agreement (NoLoCo)."""
    pull: float | None = Field(default=None, ge=0.0)
    """gamma, among pairs: how far theta goes towards the pair's mean of theta; None: eta, for which half of the bytes
    are enough."""
    feedback: float = Field(default=1.0, ge=0.0, le=1.0)
    """The share of an encoding's error that is added to the next message."""


async def local(me: Learner, options: LocalOptions) -> None:
    """Each learner steps alone. Every H steps all average their weights, and an outer optimizer takes the result.

    Equation, for every learner l of L, with theta the weights last agreed on and v the outer momentum, initially 0::

        each step:             x_l <- x_l - a g_l(x_l)
        after every H-th step: D = theta - (1/L) sum_j x_j
                               v <- beta v + D
                               theta <- theta - eta v                  (classical momentum)
                               theta <- theta - eta (D + beta v)       (Nesterov's)
                               x_l <- alpha x_l + (1 - alpha) theta

    with a the step size of the local optimizer, whose own state stays with each learner unless `optimizer_state` says
    otherwise. Only an agreement waits for the slowest learner. The methods of this family differ in their constants:

    - Local SGD (`local-sgd`): eta = 1, beta = 0, so that theta is the mean. With `warm_up` it is post-local SGD.
    - BMUF (`bmuf`): beta = 1 - 1/L, with eta = zeta. With Nesterov's momentum, theta is the model that the paper
      broadcasts, W + beta Delta, and not W.
    - SlowMo (`slowmo`): v <- beta v + D / a and theta <- theta - eta a v, with a the learning rate of the last step.
    - DiLoCo (`diloco`): Nesterov's momentum with beta = 0.9, eta = 0.7 and an inner AdamW. The paper has H = 500.
    - Streaming DiLoCo (`streaming-diloco`): P fragments of the weights agree in turn. Each is averaged while the next
      tau steps are made: D is theta less the mean of the weights tau steps ago. Fragments are consecutive numbers
      here, and layers in the paper.
    - NoLoCo (`noloco`): random pairs agree, so that learners have a theta and a v of their own. With means of a pair,
      D = theta_l - mean(x) + (gamma / eta - 1) (theta_l - mean(theta)), which is, with m = -eta v, the paper's
      m <- beta m + eta mean(x - theta) + gamma (mean(theta) - theta_l), theta_l <- theta_l + m.
    - EASGD (`easgd`): instead of taking theta, x_l <- x_l + r (theta - x_l) with r = eta / L, and theta moves by eta D,
      which is the sum of what learners move. Both are from theta and x_l one step before (tau = 1).
    - SPARTA (`sparta`): at every step a random share of the weights agrees, and takes its mean.
    - SparseLoCo (`sparseloco`): learners send the largest numbers of theta - x_l + 0.95 e_l in 2 bits. The error e_l,
      kept by `feedback`, takes the place of the outer momentum.

    With `compression`, learners send theta - x_l encoded, and D is the mean of what is decoded. The last period ends
    with the budget, and with an agreement about all weights, with alpha = 0; among pairs learners differ after it.

    Args:
        me: The learner that runs this coroutine.
        options: How often learners agree, and how.

    References:
        McMahan et al. 2017, arXiv 1602.05629; Stich 2019, arXiv 1805.09767 (Local SGD); Lin et al. 2020, arXiv
        1808.07217 (post-local SGD).
        Chen & Huo 2016, "Scalable training of deep learning machines by incremental block training with intra-block
        parallel optimization and blockwise model-update filtering", ICASSP (BMUF).
        Wang et al. 2020, arXiv 1910.00643 (SlowMo).
        Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105.
        Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", arXiv 2501.18512.
        Kolehmainen et al. 2025, arXiv 2506.10911 (NoLoCo); Zhang et al. 2015, arXiv 1412.6651 (EASGD); the code of
        exo's gym (SPARTA); Sarfi et al. 2025, arXiv 2508.15706 (SparseLoCo).
    """
    period = Period(me, options)
    with suppress(LoopEnded):
        while me.claim():
            gradient = me.gradient(me.weights)
            me.step(await (period.means.start(gradient) if period.is_warming_up else gradient))
            await period.after_step()
    await period.end()


class Period:
    """One learner's agreements: when a fragment of the weights is averaged, and what follows from its mean."""

    def __init__(self, me: Learner, options: LocalOptions) -> None:
        import torch

        self._me, self._options = me, options
        self._momentum = 1.0 - 1.0 / me.world if options.momentum is None else options.momentum
        self.means = Means(me, options.compression, options.feedback)
        self._pairs = Pairs(me, options) if options.among == "pairs" else None
        needs_theta = self.means.are_encoded or (self._pairs is not None and self._pairs.needs_theta)
        is_taken = options.rate == 1.0 and self._momentum == 0.0 and not options.elastic
        self._is_mean = is_taken and not needs_theta
        largest = -(-len(me.weights) // options.fragments)
        self._fragments = me.pieces(largest)
        self._states = [] if options.optimizer_state == "local" else me.pieces(largest, True)[len(self._fragments) :]
        self._steps = me.strategy_state("steps", torch.zeros(1, dtype=torch.int64))
        if not self._is_mean:
            is_common = self._pairs is None
            self._theta = me.strategy_state("theta", me.weights, is_common)
            self._v = me.strategy_state("momentum", me.weights.new_zeros(len(me.weights)), is_common)
        self._under_way: tuple[slice, Awaitable[Tensor]] | None = None
        if options.overlap:
            whole = self._theta - me.weights if self.means.are_encoded else me.weights
            self._sent = me.strategy_state("sent", whole, is_common=False)
            for fragment, since in self._since():
                if since < options.overlap:  # it was being averaged when the checkpoint was saved
                    self._under_way = fragment, self._start(self._sent[fragment], fragment)

    @property
    def _local_steps(self) -> int:
        """The steps made alone so far."""
        return int(self._steps) - self._options.warm_up

    @property
    def is_warming_up(self) -> bool:
        """Whether learners still step together."""
        return self._local_steps < 0

    async def after_step(self) -> None:
        """Agree on what is due after a step."""
        self._steps.add_(1)
        if self._local_steps <= 0:
            if self._local_steps == 0 and not self._is_mean:
                self._theta.copy_(self._me.weights)
                self.means.forget()
            return
        overlap = self._options.overlap
        if overlap and any(since == overlap % self._options.every for _, since in self._since()):
            await self._merge()
        for fragment, since in self._since():
            if since == 0:
                if self._options.share < 1.0:
                    await self._average_a_share()
                    continue
                mine = self._mine(fragment)
                if overlap:  # a checkpoint may be saved before the mean is used
                    mine = self._sent[fragment].copy_(mine)
                self._under_way = fragment, self._start(mine, fragment)
                if not overlap:
                    await self._merge()
        if self._local_steps % self._options.every == 0:
            for piece in self._states:
                mine, is_mean = self._me.snapshot(piece), self._options.optimizer_state == "averaged"
                self._me.replace(await self._me.mean(mine) if is_mean else 0.0 * mine, piece)

    async def end(self) -> None:
        """Agree on all weights, unless that has just been done."""
        await self._merge()
        options = self._options
        is_partial = len(self._fragments) > 1 or options.overlap > 0 or options.elastic or options.share < 1.0
        if not is_partial and self._local_steps % options.every == 0:
            return
        if self._local_steps > 0:
            for fragment in self._fragments:
                self._agree(fragment, await self._start(self._mine(fragment), fragment), is_last=True)

    def _since(self) -> Iterator[tuple[slice, int]]:
        """The fragments whose averaging has begun at least once, with the steps since it last did."""
        every, steps = self._options.every, self._local_steps
        for number, fragment in enumerate(self._fragments, 1):
            first = every * number // len(self._fragments)
            if steps >= first:
                yield fragment, (steps - first) % every

    def _mine(self, fragment: slice) -> Tensor:
        """A fragment of the weights x or, if it is encoded, of theta - x."""
        mine = self._me.snapshot(fragment)
        return self._theta[fragment] - mine if self.means.are_encoded else mine

    def _start(self, mine: Tensor, fragment: slice) -> Awaitable[Tensor]:
        """Start averaging a fragment."""
        if self._pairs is None:
            return self.means.start(mine, fragment)
        number = -(-self._local_steps // self._options.every)
        return self._pairs.mean(number, mine, self._theta[fragment] if self._pairs.needs_theta else None)

    async def _merge(self) -> None:
        if self._under_way is not None:
            (fragment, mean), self._under_way = self._under_way, None
            self._agree(fragment, await mean)

    def _agree(self, fragment: slice, mean: Tensor, is_last: bool = False) -> None:
        """Make a step of the outer optimizer, and take its result, or as much of it as the options say."""
        options, drawn = self._options, None
        if options.elastic and not is_last:  # towards theta, from both as they were when the mean began
            sent = self._sent[fragment] if options.overlap else self._mine(fragment)
            drawn = options.rate / self._me.world * (sent if self.means.are_encoded else self._theta[fragment] - sent)
        theta = mean if self._is_mean else self._outer_step(fragment, mean)
        if drawn is not None:
            self._me.apply(drawn, fragment)
            return
        if options.blend and not is_last:
            theta = options.blend * self._me.snapshot(fragment) + (1.0 - options.blend) * theta
        self._me.replace(theta, fragment)

    async def _average_a_share(self) -> None:
        """Average one random weight of each of k equal parts of the weights, the same on all learners."""
        import torch

        size, me = len(self._me.weights), self._me
        k = max(1, round(self._options.share * size))
        if me.weights.device.type == "meta":
            await me.mean(me.weights.new_empty(k))
            me.replace(me.weights)
            return
        generator = torch.Generator().manual_seed((me.seed * 1_000_003 + int(self._steps)) % 2**63)
        bounds = torch.arange(k + 1) * size // k
        places = bounds[:-1] + (torch.rand(k, generator=generator, dtype=torch.float64) * bounds.diff()).long()
        places = places.to(me.weights.device)
        mean = await me.mean(me.weights[places])
        me.replace(me.snapshot().index_copy_(0, places, mean))

    def _outer_step(self, fragment: slice, mean: Tensor) -> Tensor:
        """Change a fragment of theta and of v in place; returns that of theta `[n]`. Of a large model, each vector that
        it makes on the way costs as much as several operations."""
        options, beta, theta, v = self._options, self._momentum, self._theta[fragment], self._v[fragment]
        a = self._me.learning_rate(fragment) if options.divided_by_rate else 1.0
        difference = mean if self.means.are_encoded else theta - mean
        if options.divided_by_rate:
            difference = divided(difference, a)
        v.mul_(beta).add_(difference)
        step = (beta * v).add_(difference).mul_(options.rate * a) if options.nesterov else options.rate * a * v
        return theta.sub_(step)


class Pairs:
    """Means of random pairs; the learner that remains of an odd number is a pair with itself.

    With theta, the mean of x is moved so that theta less the result is D.
    """

    def __init__(self, me: Learner, options: LocalOptions) -> None:
        self._me, self._topology = me, pairs(me.world, me.seed)
        self._excess = 0.0 if options.pull is None else options.pull / options.rate - 1.0
        self.needs_theta = self._excess != 0.0

    async def mean(self, number: int, x: Tensor, theta: Tensor | None) -> Tensor:
        """The mean of my pair in agreement `number`."""
        me, mean = self._me, x
        vectors = [x] if theta is None else [x, theta.clone()]
        for peer in self._topology.targets(number, me.rank):
            exchanges = [me.exchange(peer, mine, tag=number) for mine in vectors]
            mean = 0.5 * (x + await exchanges[0])
            if theta is not None:
                mean += 0.5 * self._excess * (await exchanges[1] - theta)
        return mean


def _check(options: LocalOptions, world: int) -> None:
    if options.among == "all" and options.pull is not None:
        raise ConfigError("strategy.pull: only for `among: pairs`; leave it out")
    if options.among == "pairs" and (
        options.fragments > 1
        or options.overlap
        or options.compression != "none"
        or options.optimizer_state == "averaged"
        or options.elastic
        or options.share < 1.0
    ):
        raise ConfigError(
            "strategy.among: pairs exchange all weights at once, as float32, and take the result; leave out fragments, "
            "overlap, compression, elastic, share and optimizer_state: averaged"
        )
    if options.fragments > options.every:
        raise ConfigError(
            f"strategy.fragments: {options.fragments} fragments cannot agree in turn within {options.every} steps; "
            "set at most `every`"
        )
    if options.share < 1.0 and not _takes_means(options):
        raise ConfigError(
            "strategy.share: the weights that agree take their mean; leave out rate, momentum, fragments, overlap, "
            "blend, elastic and compression, or share"
        )
    if options.elastic and options.blend:
        raise ConfigError(
            "strategy.blend: with elastic, learners keep weights of their own already; leave out one of both"
        )
    if options.elastic and isinstance(options.compression, TopK):
        raise ConfigError(
            "strategy.compression: learners that keep weights of their own differ from theta for good, and what top_k "
            "leaves out of these differences would be added up without end; choose bfloat16, int8 or int4"
        )
    if options.feedback < 1.0 and isinstance(options.compression, LowRank):
        raise ConfigError("strategy.feedback: low_rank feeds back all of its error; leave out feedback")
    if isinstance(options.compression, LowRank) and (options.fragments > 1 or options.overlap):
        raise ConfigError(
            "strategy.compression: low_rank sends factors of whole matrices, in two means; leave out fragments and "
            "overlap"
        )
    if options.overlap > options.every // options.fragments:
        raise ConfigError(
            f"strategy.overlap: a fragment would still be averaged after {options.overlap} steps when the next one "
            f"begins, {options.every // options.fragments} steps later; set at most that"
        )


def _takes_means(options: LocalOptions) -> bool:
    """Whether an agreement about some weights is their mean and nothing else."""
    fields = ("rate", "momentum", "fragments", "overlap", "blend", "elastic", "compression")
    return all(getattr(options, name) == LocalOptions.model_fields[name].default for name in fields)


class BmufOptions(LocalOptions):
    """The options of `bmuf`."""

    every: int = Field(default=50, ge=1)
    warm_up: int = Field(default=500, ge=0)
    momentum: float | None = Field(default=None, ge=0.0, lt=1.0)
    nesterov: bool = True


class SlowMoOptions(LocalOptions):
    """The options of `slowmo`."""

    every: int = Field(default=48, ge=1)
    momentum: float | None = Field(default=0.5, ge=0.0, lt=1.0)
    divided_by_rate: bool = True


class DiLoCoOptions(LocalOptions):
    """The options of `diloco`."""

    every: int = Field(default=100, ge=1)
    rate: float = Field(default=0.7, gt=0.0)
    momentum: float | None = Field(default=0.9, ge=0.0, lt=1.0)
    nesterov: bool = True


class StreamingOptions(DiLoCoOptions):
    """The options of `streaming-diloco`."""

    rate: float = Field(default=0.4, gt=0.0)
    fragments: int = Field(default=4, ge=1)
    overlap: int = Field(default=5, ge=0)
    blend: float = Field(default=0.5, ge=0.0, lt=1.0)


class NoLoCoOptions(LocalOptions):
    """The options of `noloco`."""

    every: int = Field(default=50, ge=1)
    rate: float = Field(default=0.7, gt=0.0)
    momentum: float | None = Field(default=0.5, ge=0.0, lt=1.0)
    among: Literal["all", "pairs"] = "pairs"


class EasgdOptions(LocalOptions):
    """The options of `easgd`."""

    every: int = Field(default=10, ge=1)
    rate: float = Field(default=0.9, gt=0.0)
    overlap: int = Field(default=1, ge=0)
    elastic: bool = True


class SpartaOptions(LocalOptions):
    """The options of `sparta`."""

    every: int = Field(default=1, ge=1)
    share: float = Field(default=0.005, gt=0.0, le=1.0)


class SparseLoCoOptions(LocalOptions):
    """The options of `sparseloco`."""

    every: int = Field(default=30, ge=1)
    compression: Compression = TopK(top_k=0.02, bits=2)
    feedback: float = Field(default=0.95, ge=0.0, le=1.0)


def _strategy(name: str, summary: str, options: type[LocalOptions]) -> Strategy:
    return Strategy(
        name,
        summary,
        local,
        options=options,
        check=_check,
        adopts_changes=lambda options: _takes_means(options) and options.pull is None,
        keeps_state=True,
        kind="periodic",
    )


LOCAL_SGD = _strategy("local-sgd", "step alone, average all weights every few steps", LocalOptions)
BMUF = _strategy("bmuf", "step alone, filter the mean of every block of steps with momentum", BmufOptions)
SLOWMO = _strategy("slowmo", "step alone, follow the mean with a slow momentum in units of the rate", SlowMoOptions)
DILOCO = _strategy("diloco", "step alone, follow the mean with an outer Nesterov optimizer", DiLoCoOptions)
STREAMING_DILOCO = _strategy(
    "streaming-diloco", "as diloco, one fragment of the weights after another, in the background", StreamingOptions
)
NOLOCO = _strategy("noloco", "step alone, follow the mean of a random pair with an outer momentum", NoLoCoOptions)
EASGD = _strategy("easgd", "step alone, drawn to a common centre and this to all, every few steps", EasgdOptions)
SPARTA = _strategy("sparta", "step alone, average a random share of the weights at each step", SpartaOptions)
SPARSELOCO = _strategy(
    "sparseloco", "as diloco, sending a few of the numbers in 2 bits, with errors for a momentum", SparseLoCoOptions
)
