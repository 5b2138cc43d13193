"""A learner's state, sent to others over a process group."""

import json
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from starling.checkpoint.encoding import apart, decode_state, encode_state
from starling.checkpoint.state import LearnerState
from starling.engines.processes.communication import communicating

_BUFFER = "buffer."


def share_state(state: LearnerState, source: int) -> LearnerState:
    """Every learner's `state`, with the weights, buffers and optimizer of learner `source` in the place of its own.

    All learners of the default process group call it. What they keep of the model on behalf of all stays theirs.
    """
    tensors: dict[str, Tensor] = {}
    scalars: Any = None
    if state.rank == source:
        optimizer = encode_state(state.optimizer, "optimizer", tensors)
        tensors |= {"weights": state.weights, **{_BUFFER + name: each for name, each in state.buffers.items()}}
        tensors = apart(tensors)
        scalars = {
            "optimizer": optimizer,
            "tensors": {name: [str(each.dtype).partition(".")[2], list(each.shape)] for name, each in tensors.items()},
        }
    scalars = json.loads(_broadcast_bytes(json.dumps(scalars).encode(), source))
    received = {
        name: _broadcast(tensors.get(name), dtype, shape, source) for name, (dtype, shape) in scalars["tensors"].items()
    }
    return replace(
        state,
        weights=received["weights"],
        buffers={name.removeprefix(_BUFFER): each for name, each in received.items() if name.startswith(_BUFFER)},
        optimizer=decode_state(scalars["optimizer"], received),
    )


def _broadcast_bytes(content: bytes, source: int) -> bytes:
    length = torch.tensor([len(content)], dtype=torch.int64)
    with communicating():
        dist.broadcast(length, src=source)
    sent = torch.zeros(int(length), dtype=torch.uint8)
    if dist.get_rank() == source:
        sent.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    with communicating():
        dist.broadcast(sent, src=source)
    return sent.numpy().tobytes()


def _broadcast(own: Tensor | None, dtype: str, shape: list[int], source: int) -> Tensor:
    sent = torch.empty(shape, dtype=getattr(torch, dtype)) if own is None else own
    if sent.numel():
        with communicating():
            dist.broadcast(sent.reshape(-1).view(torch.uint8), src=source)
    return sent
