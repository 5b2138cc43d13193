"""Optimizer state survives safetensors and JSON, bit by bit."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save
from torch import nn

from starling.checkpoint.files import apart, write_tensors
from starling.checkpoint.state import decode_state, encode_state
from starling.errors import CheckpointError


def through_files(state: Any) -> Any:
    """What comes back of a nested state that was written to the two formats."""
    tensors: dict[str, torch.Tensor] = {}
    encoded = json.dumps(encode_state(state, "optimizer", tensors), allow_nan=False)
    return decode_state(json.loads(encoded), load(save(apart(tensors))))


def same(left: Any, right: Any) -> bool:
    """Whether two nested states are equal in types, keys and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def trained(name: str, steps: int, state: dict[str, Any] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small layer and its optimizer after some steps, going on from `state` if there is one."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.01, **options)
    if state is not None:
        optimizer.load_state_dict(state)
    for step in range(steps):
        optimizer.zero_grad()
        layer(torch.full((4, 3), 1.0 + step)).square().mean().backward()
        optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize(
    "name",
    [
        "SGD",
        "Adam",
        "AdamW",
        "Adagrad",
        "Rprop",
        "RMSprop",
        "NAdam",
        "RAdam",
        "ASGD",
        "Adadelta",
        "Adamax",
        "Adafactor",
    ],
)
def test_the_state_of_every_optimizer_comes_back_as_it_was(name: str) -> None:
    """Types, key order and bits of a state_dict are kept, so that the next step is the same to the bit."""
    state = trained(name, steps=3)[1].state_dict()
    restored = through_files(state)
    assert same(state, restored)
    assert same(
        [each.data for each in trained(name, 2, state)[0].parameters()],
        [each.data for each in trained(name, 2, restored)[0].parameters()],
    )


def test_numbers_that_json_lacks_and_odd_keys_are_kept() -> None:
    """Infinities, NaN, integer keys, tuples in lists, and keys that look like our own marks come back."""
    state = {1: (math.inf, [-math.inf, ()]), "$tensor": {"a": None}, "b": {2.5: True, None: "x"}}
    assert same(through_files(state), state)
    assert math.isnan(through_files({"a": math.nan})["a"])


def test_tensors_that_share_memory_are_saved_apart() -> None:
    """safetensors refuses shared memory; views of one storage are written as tensors of their own."""
    whole = torch.arange(6.0)
    assert same(
        through_files({"a": whole[:3], "b": whole[3:], "c": whole}), {"a": whole[:3], "b": whole[3:], "c": whole}
    )


def test_what_cannot_be_saved_is_named() -> None:
    """A function in the state is an error that says where it stands."""
    with pytest.raises(CheckpointError, match=r"optimizer\.param_groups\.0\.hook is a function"):
        encode_state({"param_groups": [{"hook": lambda: None}]}, "optimizer", {})


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_saved_tensors_have_the_mode_of_other_new_files(umask: int, tmp_path: Path) -> None:
    """The safetensors library makes its files private, so that colleagues could not read them."""
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "tensors", {"weights": torch.ones(3)})
        (tmp_path / "other").write_text("")
    finally:
        os.umask(before)
    assert (tmp_path / "tensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert torch.equal(load_file(tmp_path / "tensors")["weights"], torch.ones(3))
