"""Tensors of which there are only shape and dtype: what learners hold in a timing-only run."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_META = torch.device("meta")
_IN_PLACE = ("add_", "sub_", "mul_", "div_", "copy_", "zero_", "fill_", "clamp_")
_MADE_OF_ONE = ("clone", "detach", "cpu", "contiguous", "__neg__")
_MADE_OF_TWO = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__")


class Sizes(Tensor):
    """A tensor without numbers, wherever a strategy wants to have it.

    What strategies do with vectors is answered here: torch's own meta tensors, which answer everything else, take a
    hundred times as long for an addition. A vector that was made from another may be any vector of its size, because
    no two differ.
    """

    _length: int
    """Of a vector; -1 for anything else."""
    _dtype: torch.dtype
    _shape: torch.Size

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ELEMENTWISE and isinstance(args[0], Sizes):
            if kwargs and "out" in kwargs:
                return kwargs["out"]
            if not kwargs and (made := args[0]._with(*args[1:])) is not None:
                return made
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        """Look up shape and dtype once."""
        if name not in ("_length", "_dtype", "_shape"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._shape, self._dtype = super().shape, super().dtype
        self._length = self._shape[0] if len(self._shape) == 1 else -1
        return self.__dict__[name]

    shape = property(lambda self: self._shape)
    dtype = property(lambda self: self._dtype)
    device = property(lambda self: _META)
    nbytes = property(lambda self: self.numel() * self._dtype.itemsize)
    _version = 0  # it never changes

    def __len__(self) -> int:
        return self._shape[0]

    def dim(self) -> int:
        return len(self._shape)

    def numel(self) -> int:
        return self._shape.numel()

    def element_size(self) -> int:
        return self._dtype.itemsize

    def to(self, *args: Any, **kwargs: Any) -> Any:
        dtype = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)), self._dtype)
        if dtype is self._dtype:
            return self
        return _vector(self._length, dtype) if self._length >= 0 else super().to(dtype)

    def __getitem__(self, where: Any) -> Any:
        if self._length < 0 or type(where) is not slice:
            return super().__getitem__(where)
        return _vector(len(range(*where.indices(self._length))), self._dtype)

    def __setitem__(self, where: Any, value: Any) -> None: ...

    def new_empty(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], int) and not kwargs:
            return _vector(args[0], self._dtype)
        return super().new_empty(*args, **kwargs)

    new_zeros = new_empty

    def _with(self, other: Any = 0.0, *others: Any) -> Any:
        """The vector that this one and another, or a number, make element by element; None: ask torch."""
        fits = isinstance(other, int | float) or (
            isinstance(other, Sizes) and other._length == self._length and other._dtype is self._dtype
        )
        return _vector(self._length, self._dtype) if self._length >= 0 and fits and not others else None


def vector(length: int, dtype: torch.dtype = torch.float32) -> Sizes:
    """A vector that is no other."""
    return torch.empty(length, dtype=dtype, device=_META).as_subclass(Sizes)


@lru_cache(maxsize=4096)
def _vector(length: int, dtype: torch.dtype) -> Sizes:
    return vector(length, dtype)


def _answer_alone(name: str) -> Callable[..., Any]:
    general = getattr(Tensor, name)

    def answer(self: Sizes, *args: Any, **kwargs: Any) -> Any:
        return general(self, *args, **kwargs) if self._length < 0 else _vector(self._length, self._dtype)

    return answer


def _answer_for_two(name: str) -> Callable[..., Any]:
    general = getattr(Tensor, name)

    def answer(self: Sizes, other: Any) -> Any:
        made = self._with(other)
        return general(self, other) if made is None else made

    return answer


def _stay(self: Sizes, *args: Any, **kwargs: Any) -> Sizes:
    return self


for _name in _MADE_OF_ONE:
    setattr(Sizes, _name, _answer_alone(_name))
for _name in _MADE_OF_TWO:
    setattr(Sizes, _name, _answer_for_two(_name))
for _name in _IN_PLACE:
    setattr(Sizes, _name, _stay)
_ELEMENTWISE = frozenset(
    (torch.add, torch.sub, torch.mul, torch.div, torch.empty_like, torch.zeros_like, torch.clone, torch.neg)
)
