"""The update rules of parameter servers: which gradients make a step, and which workers may pull the weights.

Each rule is the class of its options, and `ServerOptions.model_validate` chooses it by `update`. In their equations w
is a server's piece of the weights, a the step size of its optimizer, and g_l(Phi_l) the gradient that worker l computed
at Phi_l, the weights that it pulled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from starling.configuration import Config
from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies.base import Strategy, SyncGroups
from starling.strategies.parts.staleness import Correction, Staleness, correction, rate_scale

if TYPE_CHECKING:
    from torch import Tensor


class Served(Config):
    """The options of all strategies with servers that keep the model: the number of servers, and where they run."""

    shards: int = Field(default=1, ge=1)
    """The number of servers. Each keeps one shard of the model in host memory, with the state of its optimizer."""
    servers: Literal["beside", "own"] = "beside"
    """Where servers run: `beside`, in the processes of workers whose ranks are far apart, so that they are on different
    nodes; `own`, as the last learners, which compute no gradients."""

    def workers(self, world: int) -> range:
        """Return the learners that compute gradients."""
        return range(world - self.shards if self.servers == "own" else world)

    def server(self, shard: int, world: int) -> int:
        """Return the learner that is the server of a model shard."""
        return world - self.shards + shard if self.servers == "own" else shard * world // self.shards

    def pieces(self, num_weights: int) -> list[slice]:
        """Return each server's piece of the weights. Raises `ConfigError` if there are more servers than weights."""
        shards = self.shards
        if shards > num_weights:
            raise ConfigError(f"strategy.shards: {shards} servers cannot share the model's {num_weights} parameters")
        return [slice(num_weights * s // shards, num_weights * (s + 1) // shards) for s in range(shards)]

    def kept(self, me: Learner) -> slice | None:
        """Return the piece that a learner keeps as a server, or None if it is not a server."""
        pieces = self.pieces(len(me.weights))
        return next((piece for s, piece in enumerate(pieces) if self.server(s, me.world) == me.rank), None)


class ServedStrategy(Strategy):
    """A strategy whose options are `Served`: servers keep the model. If one is lost, a worker takes its place, and the
    shard begins again with the weights that this worker had pulled, and a new optimizer."""

    is_served = True

    def sync_groups(self, options: Served, world: int) -> SyncGroups:
        return SyncGroups(len(options.workers(world)), self.sync_group_size(options, world))

    def survivors(self, options: Served, world: int, lost: Collection[int]) -> Sequence[int]:
        before = [options.server(shard, world) for shard in range(options.shards)]
        workers = [rank for rank in range(world) if rank not in lost and rank not in before]
        self.validate(options, world - len(lost))
        servers = [workers.pop(0) if rank in lost else rank for rank in before]
        return [*workers, *servers] if options.servers == "own" else [*servers, *workers]

    def successors(
        self, options: Any, members: Sequence[int], lost: Collection[int], joined: Sequence[int] = ()
    ) -> tuple[int, ...]:
        order = list(super().successors(options, members, lost, joined))
        for shard in reversed(range(options.shards if options.servers == "beside" else 0)):  # these servers come first
            order.insert(options.server(shard, len(order)), order.pop(shard))
        return tuple(order)

    def validate(self, options: Served, world: int) -> None:
        if options.servers == "own" and world <= options.shards:
            raise ConfigError(
                f"strategy.shards: with {options.shards} servers as learners of their own, none of the {world} "
                "learners is a worker; start more learners, or choose servers: beside"
            )
        if options.shards > world:
            raise ConfigError(
                f"strategy.shards: {options.shards} servers, but only {world} learners to run them; choose at most "
                f"{world}"
            )
        super().validate(options, world)


class ServerOptions(Served):
    """The options of `parameter-server`: an update rule, and the options of that rule."""

    update: Literal["asynchronous", "summed", "hybrid", "synchronous"] = "asynchronous"
    """The gradients that make one step. `asynchronous`: each gradient, when it arrives; `summed`: the next `sum`
    gradients, from any workers; `hybrid`: one gradient from each worker; `synchronous`: each gradient, while workers
    take turns."""

    def __new__(cls, **options: Any) -> ServerOptions:
        """Create the options of the rule that `update` names, so that `ServerOptions(update=…)` works, too."""
        return super().__new__(_rule(options) if cls is ServerOptions else cls)

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_rule(cls, given: Any, handler: ModelWrapValidatorHandler[ServerOptions]) -> ServerOptions:
        if cls is not ServerOptions or not isinstance(given, dict):
            return handler(given)
        rule = _rule(given)
        return handler({"update": given["update"]}) if rule is cls else rule.model_validate(given)

    @classmethod
    def alternatives(cls) -> Sequence[type[ServerOptions]]:
        return tuple(RULES.values()) if cls is ServerOptions else (cls,)

    @property
    def overlaps(self) -> bool:
        """Whether a worker computes its next gradient while it receives new weights."""
        return False

    @property
    def most_waiting(self) -> int:
        """Largest number of gradients that wait for other gradients while their workers continue."""
        return 0

    def is_due(self, num_waiting: int, finished: Collection[float]) -> bool:
        """Return whether the gradients that have arrived since the last step make a step. A worker has just finished a
        mini-batch. `finished` contains the number of finished mini-batches of each worker."""
        return num_waiting == 1

    def grants(self, ahead: float, num_computing: int) -> bool:
        """Return whether a worker that is `ahead` mini-batches ahead of the slowest worker may pull while
        `num_computing` other workers compute."""
        return True

    def combined(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the gradient of a step with these gradients, none of which is overwritten."""
        (gradient,) = gradients
        return gradient

    def correction(self, me: Learner) -> Correction | None:
        """Return the correction of gradients that were computed at older weights, or None if such gradients are used
        without correction."""
        return None

    def rate_scale(self, staleness: float) -> float:
        """Return the factor of a step's learning rate for a staleness."""
        return 1.0


class Unlocked(ServerOptions):
    """The options of the rules under which no worker waits for another, so that gradients may be stale."""

    staleness_bound: int | None = Field(default=None, ge=0)
    """Largest number of gradients by which a worker may be ahead of the slowest worker. A worker that would be further
    ahead waits. With null, no worker waits."""
    overlap: bool = False
    """Whether the next gradient is computed at the old weights while the new weights are received."""
    scale_by_staleness: bool = False
    """Whether the learning rate of a step is divided by the mean staleness of its gradients if this is above 1."""
    staleness: Staleness = "none"
    """How gradients that were computed at older weights are corrected: `none`, `gap-aware`, or
    `delay_compensation`."""

    @model_validator(mode="after")
    def _fit(self) -> Unlocked:
        if self.overlap and self.staleness_bound == 0:
            raise ValueError(
                "staleness_bound: with 0 no worker may compute while it waits for weights; overlap needs at least 1"
            )
        return self

    @property
    def overlaps(self) -> bool:
        return self.overlap

    def grants(self, ahead: float, num_computing: int) -> bool:
        return self.staleness_bound is None or ahead <= self.staleness_bound

    def correction(self, me: Learner) -> Correction | None:
        return correction(self.staleness, me)

    def rate_scale(self, staleness: float) -> float:
        return rate_scale(staleness) if self.scale_by_staleness else 1.0


class Asynchronous(Unlocked):
    """Each gradient makes a step when it arrives, and no worker waits for another.

    Equation, for the gradient of worker l::

        w <- w - a g_l(Phi_l)

    Other workers may have changed w since worker l pulled Phi_l.

    References:
        Dean et al. 2012, "Large Scale Distributed Deep Networks", NIPS, section 4.1 (Downpour SGD).
    """

    update: Literal["asynchronous"] = "asynchronous"


class Summed(Unlocked):
    """Any n gradients make one step with their sum, and no worker waits for another.

    Equation, for the next n gradients to arrive, from any workers::

        w <- w - a (g_1(Phi_1) + ... + g_n(Phi_n))

    With `combine` mean, the sum is divided by n. The last step of a run may have fewer than n gradients.

    References:
        Aji & Heafield 2019, "Making Asynchronous Stochastic Gradient Descent Work for Transformers", arXiv 1906.03496.
    """

    update: Literal["summed"] = "summed"
    sum: int = Field(ge=1)
    """`summed`: the number of gradients in a step, usually the number of workers."""
    combine: Literal["sum", "mean"] = "sum"
    """`summed` and `hybrid`: how the gradients of a step are combined. The default of `hybrid` is their mean."""

    @property
    def most_waiting(self) -> int:
        return self.sum - 1

    def is_due(self, num_waiting: int, finished: Collection[float]) -> bool:
        return num_waiting == self.sum

    def combined(self, gradients: Sequence[Tensor]) -> Tensor:
        return _added(gradients, self.combine)


class Hybrid(ServerOptions):
    """The mean of all workers' gradients at the same weights makes a step, and every worker waits for it.

    Equation, for N workers::

        w <- w - a (1/N) sum_l g_l(w)

    This is `allreduce` with the step made by the server. Non-finite gradients are left out of the mean. With `combine`
    sum, the sum is not divided. No worker may be ahead of another.

    References:
        The name comes from the parameter server of Deep Speech.
    """

    update: Literal["hybrid"] = "hybrid"
    combine: Literal["sum", "mean"] = "mean"
    """How the gradients of a step are combined."""

    def is_due(self, num_waiting: int, finished: Collection[float]) -> bool:
        return min(finished) == max(finished)

    def grants(self, ahead: float, num_computing: int) -> bool:
        return ahead <= 0

    def combined(self, gradients: Sequence[Tensor]) -> Tensor:
        return _added(gradients, self.combine)


class Synchronous(ServerOptions):
    """One worker at a time pulls, computes a gradient and pushes it, while the others wait for their turn.

    Equation, for the worker l whose turn it is::

        w <- w - a g_l(w)

    References:
        The name comes from the parameter server of Deep Speech.
    """

    update: Literal["synchronous"] = "synchronous"

    def grants(self, ahead: float, num_computing: int) -> bool:
        return num_computing == 0


RULES: Mapping[str, type[ServerOptions]] = {
    "asynchronous": Asynchronous,
    "summed": Summed,
    "hybrid": Hybrid,
    "synchronous": Synchronous,
}
"""Rules by the value of `update`."""


def _rule(given: Mapping[str, Any]) -> type[ServerOptions]:
    """Return the class of options for `update`. If there is no such rule, return `ServerOptions` itself, which then
    reports the error."""
    return RULES.get(str(given.get("update", "asynchronous")), ServerOptions)


def _added(gradients: Sequence[Tensor], combine: str) -> Tensor:
    """Return the sum of gradients, added in order, or their mean. None of the gradients is overwritten."""
    total = gradients[0]
    for place, gradient in enumerate(gradients[1:]):
        total = total.add_(gradient) if place else total + gradient
    return total.div_(len(gradients)) if combine == "mean" and len(gradients) > 1 else total
