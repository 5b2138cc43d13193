"""The state of one learner, and its conversion to named tensors and plain JSON. Pickle is not used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from starling.errors import CheckpointError
from starling.workload import Position

if TYPE_CHECKING:
    from torch import Tensor

    from starling.checkpoint.cut import ShardOfIsland


_TENSOR, _PAIRS, _TUPLE, _FLOAT = "$tensor", "$pairs", "$tuple", "$float"
_TAGS = (_TENSOR, _PAIRS, _TUPLE, _FLOAT)
_BUFFER = "buffer."
"""Prefix of the names of the model's buffers."""
OWN_PREFIX = "own."
"""Prefix of the names of those parts of a strategy's state that differ between learners."""
MEMBERSHIP_PREFIX = OWN_PREFIX + "membership."
"""Prefix of the names of those parts of a strategy's state that become invalid when the membership changes."""
ROUNDS_PREFIX = OWN_PREFIX + "rounds."
"""Prefix of the names of those parts of a strategy's state that outlive a membership and change with the weights in
averaging rounds."""


def name_of_state(name: str, is_common: bool, for_membership: bool, of_rounds: bool) -> str:
    """Return the name under which a state stores the tensor that `Learner.strategy_state` returns."""
    if for_membership or of_rounds:
        return (MEMBERSHIP_PREFIX if for_membership else ROUNDS_PREFIX) + name
    return name if is_common else OWN_PREFIX + name


def beyond_membership(strategy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a strategy's state that remains valid in other memberships."""
    return {name: each for name, each in strategy.items() if not name.startswith(MEMBERSHIP_PREFIX)}


def counted(strategy: Mapping[str, Tensor]) -> int:
    """Return the sum of a strategy's common counts. Among learners that have done equally many mini-batches, a learner
    that has used a mean for which others still wait has a larger sum."""
    counts = (each for name, each in strategy.items() if not name.startswith(OWN_PREFIX))
    return sum(int(each) for each in counts if each.numel() == 1 and not each.is_floating_point())


def has_common(strategy: Mapping[str, Tensor]) -> bool:
    """Return whether a strategy's state includes a part that all learners have in common."""
    return any(not name.startswith(OWN_PREFIX) for name in strategy)


@dataclass(frozen=True)
class ShardState:
    """A model shard, which is a piece of the weights that one learner serves to all learners, or that all learners
    share in memory."""

    start: int
    stop: int
    """End of the shard, which is `weights[start:stop]` of the model's weights `[P]`."""
    weights: Tensor
    """Weights of the shard, `[stop - start]`, on the CPU."""
    optimizer: dict[str, Any]
    """The `state_dict` of the shard's optimizer."""

    def encode(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return the shard as JSON, without its weights. The tensors of its optimizer are added to `tensors`."""
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
    """Flat weights `[P]`, on the CPU."""
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
    loop: dict[str, Any] = field(default_factory=dict)
    """The states that a user's own loop keeps beside its learner; empty without such a loop."""
    is_complete: bool = True
    """Whether this state includes all averaging rounds that the states of other learners may include. Do not save a
    state that is not complete."""

    def copy(self) -> LearnerState:
        """Return a deep copy in CPU memory, which later training does not change."""
        copied: LearnerState = own(self)
        return copied

    def with_strategy_of(self, other: LearnerState) -> LearnerState:
        """Return this state with the common part of another learner's strategy state."""
        mine = {name: each for name, each in self.strategy.items() if name.startswith(OWN_PREFIX)}
        common = {name: each for name, each in other.strategy.items() if not name.startswith(OWN_PREFIX)}
        return replace(self, strategy=own(common) | mine)

    def for_computing(self) -> LearnerState:
        """Return this state with the weights with which the learner computes, even if it keeps shards."""
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
        """Return the state as JSON and named tensors. Raises `CheckpointError` for content that cannot be saved."""
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
            **({"loop": encode_state(self.loop, "loop", tensors)} if self.loop else {}),
        }
        return scalars | {"is_finite": all_finite(tensors.values())}, tensors

    @classmethod
    def decode(cls, scalars: dict[str, Any], tensors: dict[str, Tensor]) -> LearnerState:
        """Decode the result of `encode`. The method may raise `AttributeError`, `KeyError`, `TypeError` or `ValueError`
        for other JSON."""
        from starling.checkpoint.cut import ShardOfIsland

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
            loop=decode_state(scalars.get("loop", {}), tensors),
        )


def buffers_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's buffers by name, given the named tensors of a state."""
    return {name.removeprefix(_BUFFER): value for name, value in tensors.items() if name.startswith(_BUFFER)}


def own(value: Any) -> Any:
    """Return a copy of nested states, dictionaries, lists and tuples in which every tensor is copied to new CPU
    memory."""
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
    """Decode the result of `encode_state`. The function may raise `KeyError`, `TypeError` or `ValueError` for other
    JSON."""
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
    """Return whether every number in the tensors is finite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
