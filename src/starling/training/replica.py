"""A learner's own weights and optimizer, the operations on them that all engines share, and checks of the strategy's
requests.

Without these checks gloo would abort the process if vectors differ in size, and would silently reinterpret vectors that
differ in dtype. A failed check raises `ProtocolError`.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from starling.checkpoint.state import name_of_state
from starling.errors import ConfigError, NonFiniteError, ProtocolError
from starling.learner import Background, EncodedMean, Handle, Learner, LocalOptimizer, Shards
from starling.training.flat import split, split_gradient
from starling.training.job import Statistics
from starling.training.order import FREE, Order
from starling.training.streams import lock_for

NEVER_NEGATIVE = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta"}
"""Names of sums and averages of squares. Adding a delta computed from an older value could make them negative."""


@contextmanager
def in_turn(order: Order, locks: Sequence[AbstractContextManager[Any]]) -> Generator[None, None, None]:
    """A context in which only the calling activity, in its turn, uses the data that these locks guard."""
    if order.gives:
        order.wait()
    with ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        if order.notes:
            order.note()
        else:  # there is no background
            order.num_used[0] += 1
        yield


class Replica:
    """Weights `[P]`, the parameters that view them, and the optimizer that changes them, under one lock.

    `param.grad` is a view into `gradients` `[P]` or, if `gradients` must not be overwritten, into a `workspace` `[P]`,
    which replicas may share. A gradient in other memory is first copied there. `sum_over_island` adds up a number over
    the ranks of the learner's island, if there is an island; all of these ranks call it.
    """

    def __init__(
        self,
        weights: Tensor,
        gradients: Tensor,
        parameters: list[nn.Parameter],
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
        clip_norm: float | None,
        workspace: Tensor | None = None,
        sum_over_island: Callable[[float], float] | None = None,
    ) -> None:
        self.weights = weights
        self._size = len(weights)
        self.version = 0  # the number of changes made to the weights
        self.gradients = gradients
        self._workspace = gradients if workspace is None else workspace
        self.parameters = parameters
        """Trainable parameters, in the order of the weights."""
        self._clip_norm = clip_norm
        self._sum_over_island = sum_over_island
        self._make_optimizer = make_optimizer
        self.optimizer = make_optimizer(parameters)
        self.fast_step: Callable[[], object] | None = None
        """Function that does the same as the optimizer's `step` in less time and is called in its place; None if there
        is no such function."""
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self._memory: OptimizerMemory | None = None
        self.strategy_state: dict[str, Tensor] = {}
        """Tensors that the strategy keeps between its steps, by name."""
        self._for_rounds: list[list[Tensor]] = []
        self.sometimes_unused: set[int] = set()
        """Numbers of the parameters that had no gradient in at least one of this learner's mini-batches. Only these can
        lack a gradient in a mean over learners."""
        self._lock = lock_for(weights.device)
        self.order: Order = FREE
        """The order in which the learner's activities use the weights."""

    def _in_turn(self) -> AbstractContextManager[object]:
        """Return a context in which only the calling activity, in its turn, uses the weights."""
        return self._lock if self.order is FREE else in_turn(self.order, [self._lock])

    def step(self, gradient: Tensor, learning_rate_factor: float) -> bool:
        """Clip `gradient` `[P]`, set the learning rate and make an optimizer step.

        Returns False, without a step, if the gradient is not finite.
        """
        if self.order.gives:
            self.order.wait()  # before the workspace is used, because replicas may share it
        if gradient.data_ptr() != self._workspace.data_ptr():
            gradient = self._workspace.copy_(gradient)
        # before the lock, because other ranks of an island must not wait for the background of this one
        if not math.isfinite(self.clip(gradient)):
            return False
        with self._in_turn():
            for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
                group["lr"] = peak * learning_rate_factor
            with self._as_parameter_gradients(gradient):
                (self.fast_step or self.optimizer.step)()
            self.version += 1
            return True

    @contextmanager
    def _as_parameter_gradients(self, gradient: Tensor) -> Generator[None, None, None]:
        """Within this context, `param.grad` is a view into `gradient` `[P]`, or None for a parameter without a
        gradient."""
        if gradient.data_ptr() == self._workspace.data_ptr() and not self.sometimes_unused:
            yield
            return
        own = [parameter.grad for parameter in self.parameters]
        views = split(gradient, self.parameters)
        marked = split_gradient(gradient, self.parameters) if self.sometimes_unused else []
        for number, parameter in enumerate(self.parameters):
            parameter.grad = marked[number] if number in self.sometimes_unused else views[number]
        try:
            yield
        finally:
            for parameter, before in zip(self.parameters, own, strict=True):
                parameter.grad = before

    def clip(self, gradient: Tensor) -> float:
        """Clip `gradient` `[P]` in place to `clip_norm`, and return its norm before clipping."""
        norm = float(torch.linalg.vector_norm(gradient))
        if self._sum_over_island is not None:
            norm = math.sqrt(total) if (total := self._sum_over_island(norm * norm)) >= 0.0 else math.nan
        if self._clip_norm is not None and norm > self._clip_norm:
            gradient.mul_(self._clip_norm / norm)
        return norm

    def optimizer_of_piece(self, parameters: dict[int, nn.Parameter]) -> Optimizer:
        """Create an optimizer like this replica's for parameters, or parts of them. `parameters` maps the number of
        each parameter to the parameter or its part."""
        return self._make_optimizer(list(parameters.values()))

    def learning_rate(self, factor: float) -> float:
        """Return the learning rate of the first parameter group, which is `factor` times its peak."""
        return float(self._peaks[0]) * factor

    @property
    def newest_factor(self) -> float:
        """The learning rate of the newest step, which the optimizer's state includes, in units of its peak."""
        return float(self.optimizer.param_groups[0]["lr"]) / self._peaks[0] if self._peaks[0] else 0.0

    def apply(self, delta: Tensor, piece: slice | None = None, in_round: bool = False) -> None:
        """Add a change to the weights; see `Learner.apply`. A change by an averaging round is also added to the copies
        for rounds."""
        with self._in_turn():
            for copies in self._for_rounds if in_round else ():
                self._add(copies, delta, piece)
            self._add(self._vectors, delta, piece)
            if piece is None or piece.stop == self._size:  # all pieces together count as one change
                self.version += 1

    def _add(self, vectors: Sequence[Tensor], delta: Tensor, piece: slice | None) -> None:
        """Add a change to the weights, to a piece of the weights, or to a piece of the state that the optimizer keeps
        for each weight."""
        number, start = (0, 0) if piece is None else divmod(piece.start, self._size)
        if number >= len(vectors):  # the copies were made before the optimizer's state was averaged
            return
        changed = vectors[number][start : start + len(delta)]
        changed.add_(delta.to(changed.device))
        if number > 0 and self._memory is not None and self._memory.never_negative[number - 1]:
            changed.clamp_(min=0.0)

    def copy_for_rounds(self, takes_turn: bool = True) -> list[Tensor]:
        """Return copies of the weights and of the averaged state of the optimizer, in host memory. Until
        `end_copy_for_rounds` is called, all changes by averaging rounds are added to the copies."""
        with self._in_turn() if takes_turn else self._lock:
            copies = [vector.detach().to("cpu", copy=True) for vector in self._vectors]
            self._for_rounds.append(copies)
        return copies

    def end_copy_for_rounds(self, copies: list[Tensor], state_dict: dict[str, Any]) -> dict[str, Any]:
        """Stop adding changes to these copies. Returns the optimizer's `state_dict` with the averaged state from the
        copies."""
        with self._lock:
            self._for_rounds = [each for each in self._for_rounds if each is not copies]
        if len(copies) == 1 or self._memory is None:
            return state_dict
        return self._memory.with_vectors(state_dict, copies[1:])

    @property
    def _vectors(self) -> list[Tensor]:
        """The weights and the averaged vectors of the optimizer's state."""
        return [self.weights, *(self._memory.vectors if self._memory is not None else ())]

    def replace(self, weights: Tensor, piece: slice | None = None) -> None:
        with self._in_turn():
            self._at(piece).copy_(weights)
            if piece is None or piece.stop == self._size:  # all pieces together count as one change
                self.version += 1

    def snapshot(self, piece: slice | None = None, into: Tensor | None = None) -> Tensor:
        """Return a copy of the weights or of a piece of them, in new memory or in `into`, which has the same shape."""
        with self._in_turn():
            own = self._at(piece)
            return own.clone() if into is None else into.copy_(own)

    def version_in_turn(self) -> int:
        """Return the version of the weights, which the calling activity reads in its turn."""
        with self._in_turn():
            return self.version

    def on_host(self) -> Tensor:
        """Return the weights in host memory, after all changes so far. If the model is on the CPU, the result is not a
        copy."""
        if self.weights.device.type == "cpu":
            return self.weights.detach()
        return self.snapshot().cpu()

    def pieces(self, largest: int, optimizer_state: bool) -> Sequence[slice]:
        size = self._size
        num_vectors = 1
        if optimizer_state:
            with self._lock:
                self._memory = self._memory or OptimizerMemory(self.optimizer, self.parameters, self.optimizer_of_piece)
            num_vectors += len(self._memory.vectors)
        return [
            slice(number * size + start, number * size + min(start + largest, size))
            for number in range(num_vectors)
            for start in range(0, size, largest)
        ]

    def reset_optimizer(self) -> None:
        """Discard all state that the optimizer keeps between its steps."""
        with self._lock:
            self.optimizer.state.clear()

    def restore(self, weights: Tensor, optimizer: dict[str, Any], strategy: Mapping[str, Tensor]) -> None:
        """Continue from saved weights `[P]`, a saved `state_dict` of the optimizer and the strategy's saved state."""
        self.replace(weights)
        self.optimizer.load_state_dict(optimizer)
        self.strategy_state = {name: each.clone() for name, each in strategy.items()}

    def state_of_strategy(self, name: str, initial: Tensor) -> Tensor:
        """Return the tensor that a strategy keeps under a name; see `Learner.strategy_state`."""
        kept = self.strategy_state.get(name)
        if kept is None or kept.shape != initial.shape:
            kept = initial.detach().clone()
        self.strategy_state[name] = kept = kept.to(initial.device)
        return kept

    def _at(self, piece: slice | None) -> Tensor:
        """Return a view of a piece of the weights or of the optimizer's averaged state. None means all weights."""
        if piece is None:
            return self.weights
        number, start = divmod(piece.start, self._size)
        part: Tensor = self._vectors[number][start : start + piece.stop - piece.start]
        return part


class OptimizerMemory:
    """One vector `[P]` for each value that the optimizer keeps for each weight. The optimizer's state becomes views
    into these vectors.

    `another` creates an equal optimizer for other parameters, given by number. The constructor raises `ConfigError` if
    the optimizer keeps anything except such values and a step count.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: list[nn.Parameter],
        another: Callable[[dict[int, nn.Parameter]], Optimizer],
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        if not optimizer.state:
            self._begin(another)
        names = self._checked_names()
        try:
            every = [[optimizer.state[each][name].reshape(-1) for each in parameters] for name in names]
        except KeyError as error:
            raise ConfigError(
                "strategy.optimizer_state: the optimizer's state differs between trainable parameters and cannot be "
                "averaged; choose local"
            ) from error
        self.vectors = [torch.cat(each) for each in every]
        self.never_negative = [name in NEVER_NEGATIVE for name in names]
        self._views = [
            (parameter, name, view)
            for name, vector in zip(names, self.vectors, strict=True)
            for parameter, view in zip(parameters, split(vector, parameters), strict=True)
        ]
        for parameter, name, view in self._views:
            optimizer.state[parameter][name] = view

    def take_back(self) -> None:
        """Restore the views as the optimizer's state after `load_state_dict` has replaced them. The values of the
        loaded tensors are copied to the views."""
        for parameter, name, view in self._views:
            state = self._optimizer.state[parameter]
            found = state.get(name)
            if found is not None and found.data_ptr() == view.data_ptr():
                continue
            if found is None:
                view.zero_()
            else:
                view.copy_(found)
            state[name] = view

    def with_vectors(self, state_dict: dict[str, Any], vectors: Sequence[Tensor]) -> dict[str, Any]:
        """Return a copy of the optimizer's `state_dict` in which the values for each weight come from `vectors`."""
        order = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        place = {id(parameter): number for number, parameter in enumerate(order)}
        state = {number: dict(values) for number, values in state_dict["state"].items()}
        others = [view for vector in vectors for view in split(vector, self._parameters)]
        for (parameter, name, _), other in zip(self._views, others, strict=True):
            state[place[id(parameter)]][name] = other
        return state_dict | {"state": state}

    def _begin(self, another: Callable[[dict[int, nn.Parameter]], Optimizer]) -> None:
        """Initialise the optimizer's state to zeros.

        A step of a second optimizer, on a stand-in for each parameter in turn, creates the state. The parameters
        themselves must not change, because a gradient at their values may be under way.
        """
        for number, parameter in enumerate(self._parameters):
            stand_in = nn.Parameter(torch.zeros_like(parameter))
            stand_in.grad = torch.zeros_like(parameter)
            other = another({number: stand_in})
            other.step()
            state = other.state[stand_in]
            for name, value in state.items():
                if isinstance(value, Tensor):
                    value.zero_()
                elif name == "step":
                    state[name] = 0
            self._optimizer.state[parameter] = state

    def _checked_names(self) -> list[str]:
        kind = type(self._optimizer).__name__
        names: list[str] = []
        for parameter in self._parameters:
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if name == "step" or value is None:
                    continue
                if not isinstance(value, Tensor) or value.shape != parameter.shape:
                    raise ConfigError(
                        f"strategy.optimizer_state: {kind} keeps {name!r}, which is not one number per weight and "
                        "cannot be averaged; choose local"
                    )
                if name not in names:
                    names.append(name)
        return names


T = TypeVar("T")


class ReplicaLearner(Learner, LocalOptimizer, Background, Shards):
    """The operations of a learner on its replica, which are the same on every engine. A learner is also its own
    `optimizer`, `background` and `shards`, because their methods share its state."""

    rank: int = 0
    world: int = 1
    seed: int = 0
    replica: Replica
    statistics: Statistics
    gradient_version = 0
    """Version of the weights at which the newest gradient is computed."""
    is_averaged = False
    """Whether a mean of the newest gradient has begun."""
    is_served = False
    """Whether the strategy has servers, which run in the background of learners."""
    has_common_state: bool
    """Whether the strategy declares that it keeps common state."""
    most_not_finite: int
    """Number of consecutive non-finite gradients that ends the run."""

    @property
    def weights(self) -> Tensor:
        return self.replica.weights

    @property
    def version(self) -> int:
        return self.replica.version_in_turn()

    @property
    def is_behind(self) -> bool:
        """Whether the background of the learner is running now."""
        return False

    @property
    def order(self) -> Order:
        """The order in which this learner's activities use its weights."""
        return self.replica.order

    @property
    def _itself(self) -> Self:
        return self

    optimizer = background = shards = _itself

    @property
    def shapes(self) -> Sequence[torch.Size]:
        return [parameter.shape for parameter in self.replica.parameters]

    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        if self.world > 1 or delta.is_meta or bool(delta.any()):  # a learner that averages with itself changes nothing
            self.replica.apply(delta, piece, in_round=self.is_behind)

    def replace(self, weights: Tensor, piece: slice | None = None) -> None:
        self.replica.replace(weights, piece)

    def snapshot(self, piece: slice | None = None) -> Tensor:
        return self.replica.snapshot(piece)

    def clip(self, gradient: Tensor) -> Tensor | None:
        is_finite = math.isfinite(self.replica.clip(gradient))
        self.count_finite(is_finite)
        return gradient if is_finite else None

    def count_finite(self, is_finite: bool) -> None:
        """Count non-finite gradients, which are skipped. Raises `NonFiniteError` after `most_not_finite` of them in a
        row."""
        statistics = self.statistics
        statistics.num_not_finite += not is_finite
        statistics.not_finite_in_a_row = 0 if is_finite else statistics.not_finite_in_a_row + 1
        if statistics.not_finite_in_a_row == self.most_not_finite:
            raise NonFiniteError(self.not_finite())

    @abstractmethod
    def not_finite(self) -> str:
        """Return the message that too many gradients in a row were not finite."""

    def pieces(self, largest: int, state: bool = False) -> Sequence[slice]:
        return self.replica.pieces(largest, state)

    def reset(self) -> None:
        self.replica.reset_optimizer()

    def strategy_state(
        self, name: str, initial: Tensor, is_common: bool = True, for_membership: bool = False, of_rounds: bool = False
    ) -> Tensor:
        if is_common and not (for_membership or of_rounds or self.has_common_state):
            raise ProtocolError(
                f"learner {self.rank} cannot keep {name!r} in common with others, because its strategy does not "
                "declare it: set keeps_state=True in its Strategy, or is_common=False here"
            )
        return self.replica.state_of_strategy(name_of_state(name, is_common, for_membership, of_rounds), initial)

    @abstractmethod
    def start_on_memory(self, num_bytes: int, passes: int, do: Callable[[], T]) -> Handle[T]:
        """Start `do`, which makes `passes` passes over `num_bytes` of host memory."""

    # checks of what the strategy asks

    def check_peer(self, peer: int) -> None:
        """Raise ProtocolError unless there is a learner `peer`."""
        if not 0 <= peer < self.world:
            raise ProtocolError(f"learner {self.rank} cannot exchange with learner {peer} among {self.world} learners")

    def begin_mean(
        self, of: Tensor | Handle[Tensor] | EncodedMean, group: Sequence[int] | None, sync_group: range
    ) -> None:
        """Check a mean, and count it if it shares this learner's work. In a mean over fewer learners than all, such as
        the learners of a node, the work stays with learners that are lost together. Raises `ProtocolError` unless the
        mean is over the learner's own sync group, and for a vector that `check_mean` refuses."""
        chosen = range(self.world) if group is None else group
        if chosen != sync_group and list(chosen) != list(sync_group):
            raise ProtocolError(
                f"learner {self.rank} cannot average over learners {list(chosen)}: its sync group is {list(sync_group)}"
            )
        if isinstance(of, Tensor):
            self.check_mean(of)
        if len(sync_group) < self.world:
            return
        if isinstance(of, Handle):  # the step with this gradient follows
            self.statistics.unshared.send(1.0, num_ahead=1)
        else:
            self.count_sent(of if isinstance(of, Tensor) else of.vector)

    def count_sent(self, tensor: Tensor) -> None:
        """Count a message that shares this learner's work: weights, a change of them, or either encoded, which counts
        as all weights. What a server sends is not its own work, and reports are in float64."""
        weights, is_encoded = self.replica.weights, tensor.dtype == torch.uint8
        is_work = is_encoded or (tensor.is_floating_point() and tensor.itemsize <= weights.itemsize)
        if is_work and not (self.is_served and self.is_behind):
            self.statistics.unshared.send(1.0 if is_encoded else min(1.0, tensor.numel() / len(weights)))

    def check_mean(self, vector: Tensor) -> None:
        """Raise `ProtocolError` if an averaged vector has not the dtype of the weights, or is longer than they are."""
        weights = self.replica.weights
        if vector.dim() != 1 or vector.dtype != weights.dtype or len(vector) > len(weights):
            raise ProtocolError(
                f"learner {self.rank} cannot average {vector.dtype} {list(vector.shape)}: "
                f"its weights are {weights.dtype} {list(weights.shape)}"
            )


def changed_beneath(rank: int) -> ProtocolError:
    """Return the error for a strategy that changes weights while it computes a gradient at them."""
    return ProtocolError(
        f"learner {rank}: its weights changed while a gradient at `weights` was under way; "
        "take the gradient at `snapshot()` instead"
    )


def given_away(rank: int) -> ProtocolError:
    """Return the error for a strategy that awaits a gradient after it has passed the gradient to `mean`."""
    return ProtocolError(
        f"learner {rank} awaited a gradient after giving it to `mean`; await the mean, or the gradient before that"
    )
