"""Acoustic models: a registry by name, presets by size, and the configuration that chooses."""

from dataclasses import replace
from typing import Literal

from pydantic import Field
from torch import nn

from starling.configuration import Config
from starling.speech.chance import borrowed_generators
from starling.speech.models.blstm import BlstmCtc
from starling.speech.models.lstm import LstmCtc
from starling.speech.models.shape import PRESETS, ModelShape
from starling.speech.models.subsampling import frames_after

__all__ = ["MODELS", "PRESETS", "ModelConfig", "ModelShape", "build_model", "count_parameters"]

MODELS: dict[str, type[BlstmCtc] | type[LstmCtc]] = {"blstm": BlstmCtc, "lstm": LstmCtc}


class ModelConfig(Config):
    """Which network, and its sizes: a preset, and single sizes put in place of the preset's."""

    name: Literal["blstm", "lstm"] = "blstm"
    preset: Literal["tiny", "small", "medium", "ibm"] = "small"
    layers: int | None = Field(default=None, ge=1, description="LSTM layers")
    hidden: int | None = Field(default=None, ge=1, description="units of an LSTM layer, per direction")
    bottleneck: int | None = Field(default=None, ge=0, description="units before the outputs; 0: none")
    channels: int | None = Field(default=None, ge=1, description="channels of the subsampling convolutions")
    subsampling: Literal[1, 2, 4] | None = Field(default=None, description="feature frames per encoder frame")
    dropout: float | None = Field(default=None, ge=0, lt=1)

    @property
    def shape(self) -> ModelShape:
        """The preset with the sizes given here put in."""
        given = self.model_dump(exclude={"name", "preset"}, exclude_none=True)
        return replace(PRESETS[self.preset], **given)

    def encoder_frames(self, num_frames: int) -> int:
        """Frames in which the network emits tokens, of `num_frames` feature frames."""
        return frames_after(num_frames, self.shape.subsampling)


def build_model(config: ModelConfig, num_features: int, vocab_size: int, seed: int) -> nn.Module:
    """The network of `config` with fresh weights; the same seed gives the same weights everywhere.

    `forward(features [B, T, F], lengths [B])` gives log-probabilities `[B, T', V]` and lengths `[B]`.
    The outputs of an utterance don't depend on its padding (to rounding, about 1e-6).
    """
    with borrowed_generators(seed):
        return MODELS[config.name](config.shape, num_features, vocab_size)


def count_parameters(model: nn.Module) -> int:
    """How many numbers training can change."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
