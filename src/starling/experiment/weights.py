"""A model's state as one file, for jobs whose model needs nothing else."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from starling.checkpoint.files import read_tensors, write_tensors
from starling.checkpoint.manifest import MODEL
from starling.training.flat import load_buffers, split, trainable

WEIGHTS = "model.safetensors"


def write_weights(model: nn.Module, folder: Path, weights: Tensor, buffers: dict[str, Tensor]) -> None:
    """Write a model's state with given weights `[P]` and buffers as `model.safetensors`."""
    fill(model, weights, buffers)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, model.state_dict())


def load_weights(model: nn.Module, checkpoint: Path) -> nn.Module:
    """The model with the weights of a checkpoint that `write_weights` wrote, in evaluation mode."""
    model.load_state_dict(read_tensors(checkpoint / MODEL / WEIGHTS))
    return model.eval()


def fill(model: nn.Module, weights: Tensor, buffers: Mapping[str, Tensor]) -> None:
    """Copy flat weights `[P]` and buffers into a model."""
    parameters = trainable(model)
    with torch.no_grad():
        for parameter, values in zip(parameters, split(weights, parameters), strict=True):
            parameter.copy_(values)
        load_buffers(model, buffers)
