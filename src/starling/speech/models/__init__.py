"""Acoustic models by name, their presets by size, and the configuration that chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeGuard

from pydantic import Field, ValidationInfo, field_validator, model_validator

from starling.configuration import Config
from starling.errors import ConfigError
from starling.registry import Registry
from starling.speech.models.shape import MODELS, Architecture, ModelShape, Positions, frames_after

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MODELS", "Architecture", "ModelConfig", "ModelShape", "build_model", "count_parameters", "find_model"]


def _is_architecture(found: object) -> TypeGuard[Architecture]:
    return isinstance(found, Architecture)


_REGISTRY = Registry(
    MODELS, "starling.models", accepts=_is_architecture, wanted="a starling.speech.models.Architecture"
)


def find_model(name: str) -> Architecture:
    """The architecture of a name: one in `MODELS`, an entry point of the group `starling.models`, or `module:name`.

    Raises:
        ConfigError: there is none; the message suggests the nearest name.
    """
    return _REGISTRY.find(name)


class ModelConfig(Config):
    """Which network, and its sizes: a preset, and single sizes put in place of the preset's.

    Each architecture has its own presets and sizes; any other is an error.
    """

    name: str = Field(
        default="blstm",
        description="the architecture: blstm, blstm-hybrid, dnn-hybrid, lstm, transformer, deep-speech, or module:name",
    )
    preset: str = Field(default="small", description="tiny, small, or a larger one of the architecture")
    layers: int | None = Field(default=None, ge=1, description="LSTM or dense layers, or blocks of a transformer")
    hidden: int | None = Field(
        default=None, ge=1, description="units of an LSTM layer, per direction; of each dense layer"
    )
    bottleneck: int | None = Field(default=None, ge=0, description="units before the outputs; 0: none")
    width: int | None = Field(default=None, ge=1, description="units of a frame between a transformer's blocks")
    heads: int | None = Field(default=None, ge=1, description="heads of a transformer's attention")
    feed_forward: int | None = Field(default=None, ge=1, description="units inside a transformer's feed-forward half")
    positions: Positions | None = Field(
        default=None,
        description="sinusoidal: absolute, added to the frames; rotary: relative, rotates queries and keys",
    )
    span: int | None = Field(
        default=None,
        ge=0,
        description="encoder frames that a transformer's frame attends to on either side; 0: all of its utterance",
    )
    channels: int | None = Field(default=None, ge=1, description="channels of the subsampling convolutions")
    context: int | None = Field(default=None, ge=0, description="feature frames heard on either side in deep-speech")
    subsampling: Literal[1, 2, 4] | None = Field(default=None, description="feature frames per encoder frame")
    dropout: float | None = Field(default=None, ge=0, lt=1, description="share of units that are set to 0 in training")

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str) -> str:
        try:
            find_model(name)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return name

    @field_validator("preset")
    @classmethod
    def _preset_is_known(cls, preset: str, info: ValidationInfo) -> str:
        name = info.data.get("name")  # absent if it is itself an error
        if name is not None and preset not in (presets := find_model(name).presets):
            raise ValueError(f"{name} has no preset {preset!r}; known are {', '.join(presets)}")
        return preset

    @field_validator("*")
    @classmethod
    def _size_is_one_of_the_architecture(cls, value: object, info: ValidationInfo) -> object:
        name, size = info.data.get("name"), info.field_name
        if name is None or value is None or size in ("name", "preset") or size in (sizes := find_model(name).sizes):
            return value
        raise ValueError(f"{name} has no such size; known are {', '.join(sizes)}")

    @model_validator(mode="after")
    def _sizes_fit(self) -> ModelConfig:
        _ = self.shape  # raises ValueError for sizes that don't go together
        return self

    @property
    def shape(self) -> ModelShape:
        """The preset with the sizes given here put in."""
        given = self.model_dump(exclude={"name", "preset"}, exclude_none=True)
        return replace(find_model(self.name).presets[self.preset], **given)

    def encoder_frames(self, num_frames: int) -> int:
        """Frames in which the network emits tokens, of `num_frames` feature frames."""
        return frames_after(num_frames, self.shape.subsampling)


def build_model(config: ModelConfig, num_features: int, vocab_size: int, seed: int) -> nn.Module:
    """The network of `config` with fresh weights and `vocab_size` outputs; the same seed gives the same weights.

    `forward(features [B, T, F], lengths [B])` gives log-probabilities `[B, T', V]` and lengths `[B]`.
    The outputs of an utterance don't depend on its padding (to rounding, about 1e-6).
    """
    from starling.speech.chance import borrowed_generators

    with borrowed_generators(seed):
        return find_model(config.name).load()(config.shape, num_features, vocab_size)


def count_parameters(model: nn.Module) -> int:
    """How many numbers training can change."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
