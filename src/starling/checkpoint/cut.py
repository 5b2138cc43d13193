"""Division of a model and its optimizer's state among the ranks of an island."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """The division of a model among `size` ranks. Each parameter is cut along one dimension into equal parts, and the
    last parts are padded with zeros. All ranks therefore have a vector `[P']` of the same size, which is slightly more
    than P / size."""

    size: int
    shapes: tuple[tuple[int, ...], ...]
    """The parameters' shapes, in the order of the weights `[P]`."""
    dims: tuple[int, ...] = ()
    """Dimension along which each parameter is divided, under tensor parallelism. If the tuple is empty, every parameter
    is divided along its first dimension."""

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
        """Return the vector `[P']` of one rank, given the vector `[P]` of the whole model."""
        parts, start = [], 0
        for shape, dim in zip(self.shapes, self._dims, strict=True):
            size = math.prod(shape)
            parts.append(part_of(whole[start : start + size].view(shape), self.size, member, dim).reshape(-1))
            start += size
        return torch.cat(parts)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the vector `[P]` of the whole model, given the vectors of all ranks."""
        found, start = [], 0
        for shape, local, dim in zip(self.shapes, self.local_shapes, self._dims, strict=True):
            size = math.prod(local)
            padded = torch.cat([part[start : start + size].view(local) for part in parts], dim)
            found.append(padded.narrow(dim, 0, shape[dim]).reshape(-1))
            start += size
        return torch.cat(found)

    def part_of_optimizer(self, whole: dict[str, Any], member: int, order: Sequence[int]) -> dict[str, Any]:
        """Return the `state_dict` of one rank's optimizer, given the `state_dict` for the whole model, whose parameters
        are in the order of the numbers `order`."""
        return _with_state(whole, lambda place, value: part_of(value, self.size, member, self._dims[order[place[0]]]))

    def whole_of_optimizer(self, parts: Sequence[dict[str, Any]], order: Sequence[int]) -> dict[str, Any]:
        """Return the `state_dict` for the whole model, given the `state_dict`s of all ranks' optimizers, whose
        parameters are in the order of the numbers `order`."""
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
    """Numbers of the parameters, in the order of the optimizer's `state_dict`."""

    def encode(self) -> dict[str, Any]:
        """Return the place of the shard as JSON, which serves as an index into the files of an island."""
        cut = self.cut
        dims = {"dims": cut.dims} if cut.dims else {}
        return {"size": cut.size, "shapes": cut.shapes, **dims, "member": self.member, "order": self.order}

    @classmethod
    def decode(cls, scalars: dict[str, Any], num_weights: int) -> "ShardOfIsland":
        """Decode the result of `encode` for a shard of `num_weights` weights. The method may raise `KeyError`,
        `TypeError` or `ValueError` for other JSON."""
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
    """Return rank `member`'s part of a parameter along a dimension, padded with zeros."""
    length = -(-whole.shape[dim] // size)
    own = whole.narrow(dim, *span_of(whole.shape[dim], size, member))
    shape = list(own.shape)
    shape[dim] = length - shape[dim]
    return own.contiguous() if shape[dim] == 0 else torch.cat([own, own.new_zeros(shape)], dim)


def span_of(length: int, size: int, member: int) -> tuple[int, int]:
    """Return the first row of rank `member`'s part of `length` rows, and the number of rows in that part."""
    rows = -(-length // size)
    start = min(member * rows, length)
    return start, min(rows, length - start)


def _with_state(state_dict: dict[str, Any], change: Callable[[tuple[int, str], Tensor], Tensor]) -> dict[str, Any]:
    """Return a copy of a `state_dict` in which `change` has replaced each tensor that has one value for each weight."""
    state = {
        number: {
            name: change((number, name), value) if isinstance(value, Tensor) and value.dim() > 0 else value
            for name, value in values.items()
        }
        for number, values in state_dict["state"].items()
    }
    return state_dict | {"state": state}
