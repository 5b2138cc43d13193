"""The state of one learner, its conversion to named tensors and plain JSON without pickle, and its division among the
ranks of an island."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from starling.errors import CheckpointError
from starling.workload import Position

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """How `size` ranks divide a model: each parameter is cut along one dimension into equal parts, and the last parts
    are padded with zeros. So all ranks have a vector `[P']` of the same size, slightly more than P / size."""

    size: int
    shapes: tuple[tuple[int, ...], ...]
    """The parameters' shapes, in the order of the weights `[P]`."""
    dims: tuple[int, ...] = ()
    """Dimension along which each parameter is divided, under tensor parallelism; if empty, every parameter is divided
    along its first."""

    @cached_property
    def _dims(self) -> tuple[int, ...]:
        return self.dims or (0,) * len(self.shapes)

    @cached_property
    def local_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of one rank's parts, with padding."""
        return tuple(
            (*shape[:dim], -(-shape[dim] // self.size), *shape[dim + 1 :])
            for shape, dim in zip(self.shapes, self._dims, strict=True)
        )

    @property
    def local_numbers(self) -> int:
        """P', the size of one rank's vector."""
        return sum(math.prod(shape) for shape in self.local_shapes)

    def part(self, whole: Tensor, member: int) -> Tensor:
        """The vector `[P']` of one rank, from the vector `[P]` of the whole model."""
        parts, start = [], 0
        for shape, dim in zip(self.shapes, self._dims, strict=True):
            size = math.prod(shape)
            parts.append(part_of(whole[start : start + size].view(shape), self.size, member, dim).reshape(-1))
            start += size
        return torch.cat(parts)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The vector `[P]` of the whole model, from the vectors of all ranks."""
        found, start = [], 0
        for shape, local, dim in zip(self.shapes, self.local_shapes, self._dims, strict=True):
            size = math.prod(local)
            padded = torch.cat([part[start : start + size].view(local) for part in parts], dim)
            found.append(padded.narrow(dim, 0, shape[dim]).reshape(-1))
            start += size
        return torch.cat(found)

    def part_of_optimizer(self, whole: dict[str, Any], member: int, order: Sequence[int]) -> dict[str, Any]:
        """The `state_dict` of one rank's optimizer, from the whole model's `state_dict`, whose parameters are in the
        order of the numbers `order`."""
        return _with_state(whole, lambda place, value: part_of(value, self.size, member, self._dims[order[place[0]]]))

    def whole_of_optimizer(self, parts: Sequence[dict[str, Any]], order: Sequence[int]) -> dict[str, Any]:
        """The `state_dict` of the whole model's optimizer, from those of all ranks' optimizers, whose parameters are in
        the order of the numbers `order`."""
        states = [part["state"] for part in parts]

        def joined(place: tuple[int, str], value: Tensor) -> Tensor:
            (number, name), dim = place, self._dims[order[place[0]]]
            padded = torch.cat([state[number][name] for state in states], dim)
            return padded.narrow(dim, 0, self.shapes[order[number]][dim]).contiguous()

        return _with_state(parts[0], joined)


@dataclass(frozen=True)
class ShardOfIsland:
    """The part of a model that a learner's state holds."""

    cut: Cut
    member: int
    """The learner's rank in its island."""
    order: tuple[int, ...]
    """The numbers of the parameters in the order of the optimizer's `state_dict`."""

    def encode(self) -> dict[str, Any]:
        """The shard's place as JSON: an index into the files of an island."""
        cut = self.cut
        dims = {"dims": cut.dims} if cut.dims else {}
        return {"size": cut.size, "shapes": cut.shapes, **dims, "member": self.member, "order": self.order}

    @classmethod
    def decode(cls, scalars: dict[str, Any], num_weights: int) -> ShardOfIsland:
        """The inverse of `encode`, for a shard of `num_weights` weights. May raise KeyError, TypeError or ValueError
        for other JSON."""
        shapes = tuple(tuple(map(int, shape)) for shape in scalars["shapes"])
        dims = tuple(map(int, scalars.get("dims", ())))
        cut, member = Cut(int(scalars["size"]), shapes, dims), int(scalars["member"])
        order = tuple(map(int, scalars["order"]))
        is_valid = 0 <= member < cut.size and sorted(order) == list(range(len(shapes))) and all(shapes)
        is_valid = is_valid and all(0 <= dim < len(shape) for dim, shape in zip(dims, shapes, strict=bool(dims)))
        if not is_valid or cut.local_numbers != num_weights:
            raise ValueError(f"part {member} of an island of {cut.size}")
        return cls(cut, member, order)


def part_of(whole: Tensor, size: int, member: int, dim: int = 0) -> Tensor:
    """Rank `member`'s part of a parameter along a dimension, padded with zeros."""
    length = -(-whole.shape[dim] // size)
    own = whole.narrow(dim, *span_of(whole.shape[dim], size, member))
    shape = list(own.shape)
    shape[dim] = length - shape[dim]
    return own.contiguous() if shape[dim] == 0 else torch.cat([own, own.new_zeros(shape)], dim)


def span_of(length: int, size: int, member: int) -> tuple[int, int]:
    """The first row of rank `member`'s part of `length` rows, and the number of its rows."""
    rows = -(-length // size)
    start = min(member * rows, length)
    return start, min(rows, length - start)


def _with_state(state_dict: dict[str, Any], change: Callable[[tuple[int, str], Tensor], Tensor]) -> dict[str, Any]:
    """A copy of a `state_dict` in which `change` has replaced each tensor that has one number per weight."""
    state = {
        number: {
            name: change((number, name), value) if isinstance(value, Tensor) and value.dim() > 0 else value
            for name, value in values.items()
        }
        for number, values in state_dict["state"].items()
    }
    return state_dict | {"state": state}


_TENSOR, _PAIRS, _TUPLE, _FLOAT = "$tensor", "$pairs", "$tuple", "$float"
_TAGS = (_TENSOR, _PAIRS, _TUPLE, _FLOAT)
_BUFFER = "buffer."
"""Prefix of the names of the model's buffers."""
OWN_PREFIX = "own."
"""Prefix of the names of those parts of a strategy's state that differ between learners."""
MEMBERSHIP_PREFIX = OWN_PREFIX + "membership."
"""Prefix of the names of those parts that become invalid when the membership changes."""
ROUNDS_PREFIX = OWN_PREFIX + "rounds."
"""Prefix of the names of those parts that outlive a membership and change with the weights in averaging rounds."""


def name_of_state(name: str, is_common: bool, for_membership: bool, of_rounds: bool) -> str:
    """The name under which a state stores the tensor that `Learner.strategy_state` returns."""
    if for_membership or of_rounds:
        return (MEMBERSHIP_PREFIX if for_membership else ROUNDS_PREFIX) + name
    return name if is_common else OWN_PREFIX + name


def beyond_membership(strategy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a strategy's state that is valid in other memberships, too."""
    return {name: each for name, each in strategy.items() if not name.startswith(MEMBERSHIP_PREFIX)}


def counted(strategy: Mapping[str, Tensor]) -> int:
    """The sum of a strategy's common counts. Among learners that have done equally many mini-batches, a learner that
    has used a mean for which others still wait has counted more."""
    counts = (each for name, each in strategy.items() if not name.startswith(OWN_PREFIX))
    return sum(int(each) for each in counts if each.numel() == 1 and not each.is_floating_point())


def has_common(strategy: Mapping[str, Tensor]) -> bool:
    """Whether a strategy's state includes anything that all learners have in common."""
    return any(not name.startswith(OWN_PREFIX) for name in strategy)


@dataclass(frozen=True)
class ShardState:
    """A model shard: a piece of the weights that one learner serves to all, or that all share in memory."""

    start: int
    stop: int
    """The shard is `weights[start:stop]` of the model's weights `[P]`."""
    weights: Tensor
    """Weights of the shard, `[stop - start]`, on the CPU."""
    optimizer: dict[str, Any]
    """The `state_dict` of the shard's optimizer."""

    def encode(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The shard as JSON, without its weights; the tensors of its optimizer are added to `tensors`."""
        optimizer = encode_state(self.optimizer, f"shard.{self.start}", tensors)
        return {"start": self.start, "stop": self.stop, "optimizer": optimizer}


@dataclass(frozen=True)
class LearnerState:
    """One learner's state between two mini-batches. It includes no random generators, because every seed is derived
    from the run's seed and the ticket."""

    rank: int
    world: int
    position: Position
    """The run's data position to which this state belongs."""
    minutes: float
    """Time spent training, on the engine's clock."""
    weights: Tensor
    """Weights, flat, `[P]`, on the CPU."""
    buffers: dict[str, Tensor]
    """The model's buffers by name, on the CPU."""
    optimizer: dict[str, Any]
    """The optimizer's `state_dict`."""
    epochs_ended: int | None = None
    """Number of epochs that have ended; None unless this is the state at the end of an epoch."""
    shards: tuple[ShardState, ...] = ()
    """The model shards that this learner keeps. Their weights are also in `weights`. If any learner keeps shards, the
    shards are the model."""
    strategy: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that the strategy keeps between its steps, by name, on the CPU; see `Learner.strategy_state`."""
    shard_of_island: ShardOfIsland | None = None
    """The part of an island's model that `weights` `[P']` and `optimizer` hold; None if they are those of a whole
    model."""
    of_strategy: str = ""
    """Strategy under which the learner trained, with its options, in the form of `Strategy.described`; empty if
    unknown."""
    under_shards: Tensor | None = None
    """Weights with which a worker computes if `weights` holds the weights of its shards: `[n]`, for all its shards in
    their order. None means that both are the same."""
    is_worker: bool = True
    """Whether the learner computes gradients. If it does not, its weights are valid only in its shards."""
    is_complete: bool = True
    """False if the states of other learners may include averaging rounds that this state lacks; do not save it."""

    def copy(self) -> LearnerState:
        """A deep copy in CPU memory, which later training does not change."""
        copied: LearnerState = own(self)
        return copied

    def with_strategy_of(self, other: LearnerState) -> LearnerState:
        """This state with the common part of another learner's strategy state."""
        mine = {name: each for name, each in self.strategy.items() if name.startswith(OWN_PREFIX)}
        common = {name: each for name, each in other.strategy.items() if not name.startswith(OWN_PREFIX)}
        return replace(self, strategy=own(common) | mine)

    def for_computing(self) -> LearnerState:
        """This state with the weights with which the learner computes, even if it keeps shards."""
        if self.under_shards is None:
            return self
        weights, start = self.weights.clone(), 0
        for shard in self.shards:
            stop = start + shard.stop - shard.start
            weights[shard.start : shard.stop] = self.under_shards[start:stop]
            start = stop
        return replace(self, weights=weights, under_shards=None)

    @property
    def kept(self) -> list[tuple[int, int]]:
        """`start` and `stop` of each of the learner's shards."""
        return [(shard.start, shard.stop) for shard in self.shards]

    def encode(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The state as JSON and named tensors. Raises CheckpointError for content that cannot be saved."""
        tensors = {"weights": self.weights} | {_BUFFER + name: buffer for name, buffer in self.buffers.items()}
        if self.under_shards is not None:
            tensors["under_shards"] = self.under_shards
        scalars = {
            "rank": self.rank,
            "world": self.world,
            **TypeAdapter(Position).dump_python(self.position),
            "minutes": self.minutes,
            "optimizer": encode_state(self.optimizer, "optimizer", tensors),
            "strategy": encode_state(self.strategy, "strategy", tensors),
            "is_worker": self.is_worker,
            "of_strategy": self.of_strategy,
            **({"island": self.shard_of_island.encode()} if self.shard_of_island else {}),
            "shards": [shard.encode(tensors) for shard in self.shards],
        }
        return scalars | {"is_finite": all_finite(tensors.values())}, tensors

    @classmethod
    def decode(cls, scalars: dict[str, Any], tensors: dict[str, Tensor]) -> LearnerState:
        """The inverse of `encode`. May raise AttributeError, KeyError, TypeError or ValueError for other JSON."""

        weights, under_shards = tensors["weights"], tensors.get("under_shards")
        if weights.ndim != 1 or not weights.is_floating_point():
            raise ValueError(f"weights of shape {list(weights.shape)} and dtype {weights.dtype}")
        places = [(int(each["start"]), int(each["stop"]), each["optimizer"]) for each in scalars["shards"]]
        size = sum(stop - start for start, stop, _ in places)
        if under_shards is not None and under_shards.shape != (size,):
            raise ValueError(f"under_shards of shape {list(under_shards.shape)} for {size} weights in shards")
        return cls(
            rank=scalars["rank"],
            world=scalars["world"],
            position=TypeAdapter(Position).validate_python(
                {key: scalars[key] for key in ("next_ticket", "outstanding")}
            ),
            minutes=float(scalars["minutes"]),
            weights=weights,
            buffers=buffers_in(tensors),
            optimizer=decode_state(scalars["optimizer"], tensors),
            shards=tuple(
                ShardState(start, stop, weights[start:stop], decode_state(optimizer, tensors))
                for start, stop, optimizer in places
            ),
            strategy=decode_state(scalars.get("strategy", {}), tensors),  # version 0.2 wrote none
            shard_of_island=ShardOfIsland.decode(scalars["island"], weights.numel()) if "island" in scalars else None,
            of_strategy=str(scalars.get("of_strategy", "")),  # version 0.2 wrote none
            under_shards=under_shards,
            is_worker=scalars["is_worker"],
        )


def buffers_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's buffers by name, among the named tensors of a state."""
    return {name.removeprefix(_BUFFER): value for name, value in tensors.items() if name.startswith(_BUFFER)}


def own(value: Any) -> Any:
    """A copy of nested states, dictionaries, lists and tuples, with every tensor copied to new CPU memory."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, LearnerState | ShardState):
        return replace(value, **{each.name: own(getattr(value, each.name)) for each in fields(value)})
    if isinstance(value, dict):
        return {key: own(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        items = [own(each) for each in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def encode_state(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Convert `value` to plain JSON, and add its tensors to `tensors`, named by their key path below `path`.

    Dictionaries with any scalar keys, lists, tuples, numbers (also infinite ones and NaN), strings, booleans and None
    are preserved exactly. Raises CheckpointError, naming the key path, for anything else.
    """
    from torch import Tensor

    if isinstance(value, Tensor):
        tensors[path] = value
        return {_TENSOR: path}
    if isinstance(value, dict):
        if all(isinstance(key, str) and key not in _TAGS for key in value):
            return {key: encode_state(each, f"{path}.{key}", tensors) for key, each in value.items()}
        pairs = [
            [encode_state(key, f"{path} (a key)", tensors), encode_state(each, f"{path}.{key}", tensors)]
            for key, each in value.items()
        ]
        return {_PAIRS: pairs}
    if isinstance(value, list | tuple):
        items = [encode_state(each, f"{path}.{place}", tensors) for place, each in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which cannot be saved as a tensor or as JSON; choose another optimizer"
    )


def decode_state(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `encode_state`. May raise KeyError, TypeError or ValueError for other JSON."""
    if isinstance(value, list):
        return [decode_state(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _PAIRS in value:
        return {decode_state(key, tensors): decode_state(each, tensors) for key, each in value[_PAIRS]}
    if _TUPLE in value:
        return tuple(decode_state(each, tensors) for each in value[_TUPLE])
    if _FLOAT in value:
        return float(value[_FLOAT])
    return {key: decode_state(each, tensors) for key, each in value.items()}


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number is finite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
