"""A model that really computes. It needs only torch, so that bare torch programs can use it too."""

import itertools
from collections.abc import Sequence

import torch
from torch import nn

SMALL = (64, 136, 32)
"""Widths of a perceptron with 13 k parameters."""
LARGE = (1024, 2048, 1024)
"""Widths of a perceptron with 4 M parameters."""


def perceptron(widths: Sequence[int]) -> nn.Module:
    """A multi-layer perceptron of these widths, with the same bits at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])
