"""Converts nested state, such as an optimizer's `state_dict`, to named tensors and plain JSON, without pickle."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from starling.errors import CheckpointError

_TENSOR, _PAIRS, _TUPLE, _FLOAT = "$tensor", "$pairs", "$tuple", "$float"
_TAGS = (_TENSOR, _PAIRS, _TUPLE, _FLOAT)


def encode_state(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Convert `value` to plain JSON, and add its tensors to `tensors`, named by their key path below `path`.

    Dictionaries with any scalar keys, lists, tuples, numbers (also infinite ones and NaN), strings, booleans and None
    are preserved exactly. Raises CheckpointError, naming the key path, for anything else.
    """
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


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous and without shared memory, as safetensors requires."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        owned = plain.untyped_storage().nbytes() == plain.numel() * plain.element_size()
        if not owned or plain.untyped_storage().data_ptr() in seen:
            plain = plain.clone(memory_format=torch.contiguous_format)
        seen.add(plain.untyped_storage().data_ptr())
        result[name] = plain
    return result


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number is finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
