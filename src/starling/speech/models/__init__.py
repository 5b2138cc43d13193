"""Acoustic models by name, their presets by size, and the configuration that chooses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from starling.configuration import Config
from starling.errors import ConfigError
from starling.registry import Registry
from starling.speech.models.shape import (
    MODELS,
    PUBLISHED,
    Architecture,
    AttentionConfig,
    ChunkConfig,
    DecoderConfig,
    ModelShape,
    Positions,
    PublishedShape,
    Wav2Vec2Shape,
    frames_ahead,
    published_config,
)
from starling.speech.phones import PhonesConfig

if TYPE_CHECKING:
    from torch import nn

    N = TypeVar("N", bound=nn.Module)

__all__ = ["Architecture", "ModelConfig", "ModelShape", "build_model", "count_parameters"]


_ARCHITECTURES = Registry(
    MODELS | PUBLISHED, "starling.models", accepts=Architecture, wanted="a starling.speech.models.Architecture"
)


_NO_SIZES = ("name", "preset", "decoder", "phones", "chunk", "checkpoint", "encoder")
"""Keys of `ModelConfig` that are not sizes of the network."""


class ModelConfig(Config):
    """Which network, and its sizes: a preset, and individual sizes that override the preset's.

    Each architecture has its own presets and sizes; any other is an error.
    """

    name: str = "blstm"
    """The architecture: blstm, lstm, transformer, conformer, zipformer, deep-speech, blstm-hybrid, dnn-hybrid,
    wav2vec2, whisper, or module:name."""
    preset: str = "small"
    """The preset: tiny, small, or a larger one of the architecture."""
    layers: int | None = Field(default=None, ge=1)
    """LSTM or dense layers, or blocks."""
    hidden: int | None = Field(default=None, ge=1)
    """Units of an LSTM layer, per direction; of each dense layer."""
    bottleneck: int | None = Field(default=None, ge=0)
    """Units before the outputs; 0: none."""
    width: int | None = Field(default=None, ge=1)
    """Units of a frame between blocks."""
    heads: int | None = Field(default=None, ge=1)
    """Heads of the attention."""
    feed_forward: int | None = Field(default=None, ge=1)
    """Units inside a block's feed-forward parts."""
    positions: Positions | None = None
    """rotary: relative, rotates queries and keys; relative: of the Conformer's paper; sinusoidal: absolute, added to a
    transformer's frames."""
    kernel: int | None = Field(default=None, ge=1)
    """Frames that a block's convolution hears; odd."""
    stack_rates: tuple[PositiveInt, ...] | None = None
    """For each stack of a zipformer, the encoder frames that it joins into one."""
    stack_layers: tuple[PositiveInt, ...] | None = None
    """Blocks of each stack."""
    stack_widths: tuple[PositiveInt, ...] | None = None
    """Units of a frame in each stack; multiples of 4."""
    span: int | None = Field(default=None, ge=0)
    """Encoder frames that a transformer's frame attends to on either side; 0: all of its utterance."""
    channels: int | None = Field(default=None, ge=1)
    """Channels of the subsampling convolutions."""
    conv2d_channels: int | None = Field(default=None, ge=0)
    """Channels of the first of two convolutions over time and frequency in front of a blstm; the second has twice as
    many. 0: convolutions over time alone."""
    context: int | None = Field(default=None, ge=0)
    """Feature frames heard on either side in deep-speech."""
    subsampling: Literal[1, 2, 4] | None = None
    """Feature frames per encoder frame."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Share of units that are set to 0 in training."""
    decoder: DecoderConfig | None = None
    """A decoder beside CTC: kind: attention or transducer, and its sizes; null: CTC alone."""

    phones: PhonesConfig | None = None
    """A second CTC loss, with which a lower layer learns the phones of transcripts; needs blstm, lstm, transformer or
    conformer; null: none."""

    chunk: ChunkConfig | None = None
    """A streaming model, of lstm, transformer or conformer: seconds of a chunk, and chunks before it; null: every frame
    hears the whole utterance."""

    checkpoint: Path | None = None
    """For wav2vec2 and whisper: a folder with config.json and model.safetensors of a published model, or its name on
    the Hugging Face hub."""
    encoder: dict[str, Any] | None = None
    """For wav2vec2 and whisper: the configuration of that model; Starling fills it in."""

    @model_validator(mode="before")
    @classmethod
    def _checkpoint_is_read(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or tree.get("checkpoint") is None or tree.get("encoder") is not None:
            return tree
        return tree | {"encoder": published_config(Path(tree["checkpoint"]))}

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str) -> str:
        try:
            _ARCHITECTURES.find(name)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return name

    @field_validator("preset")
    @classmethod
    def _preset_is_known(cls, preset: str, info: ValidationInfo) -> str:
        name = info.data.get("name")  # absent if it is itself an error
        if name is not None and preset not in (presets := _ARCHITECTURES.find(name).presets):
            raise ValueError(f"{name} has no preset {preset!r}; known are {', '.join(presets)}")
        return preset

    @field_validator("*")
    @classmethod
    def _size_is_one_of_the_architecture(cls, value: object, info: ValidationInfo) -> object:
        name, size = info.data.get("name"), info.field_name
        if name is None or value is None or size in _NO_SIZES or size in (sizes := _ARCHITECTURES.find(name).sizes):
            return value
        raise ValueError(f"{name} has no such size; known are {', '.join(sizes)}")

    @model_validator(mode="after")
    def _sizes_fit(self) -> ModelConfig:
        architecture = _ARCHITECTURES.find(self.name)
        shape = self.shape  # raises ValueError for sizes that don't go together
        if architecture.is_hybrid and shape.subsampling != 1:
            raise ValueError(
                f"{self.name} has an output for each feature frame: leave out subsampling {shape.subsampling}"
            )
        if isinstance(shape, PublishedShape) != (self.encoder is not None):
            raise ValueError(f"checkpoint: each of {', '.join(PUBLISHED)} needs one, and no other model has one")
        if self.encoder is not None and self.encoder.get("model_type") != self.name:
            raise ValueError(f"checkpoint: it is a {self.encoder.get('model_type')!r}, not a {self.name}")
        if self.phones is not None:
            if not architecture.can_have_phones:
                known = [name for name, each in MODELS.items() if each.can_have_phones]
                raise ValueError(f"phones: {self.name} has no layer for them; known are {', '.join(known)}")
            if self.phones.layer > (layers := getattr(shape, "layers", self.phones.layer)):
                raise ValueError(f"phones.layer is {self.phones.layer}, but model.layers is {layers}; lower it")
        if self.chunk is not None:
            if not architecture.can_stream:
                known = [name for name, each in MODELS.items() if each.can_stream]
                raise ValueError(f"chunk: {self.name} cannot stream; known are {', '.join(known)}")
            if getattr(shape, "positions", "rotary") != "rotary" or getattr(shape, "span", 0):
                raise ValueError("chunk: needs positions: rotary, and no span; leave them out")
        return self

    @property
    def shape(self) -> ModelShape:
        """The preset with the sizes given here put in."""
        given = self.model_dump(exclude=set(_NO_SIZES), exclude_none=True)
        shape = replace(_ARCHITECTURES.find(self.name).presets[self.preset], **given)
        if isinstance(shape, PublishedShape):
            shape = replace(shape, encoder=self.encoder)
        if isinstance(shape, Wav2Vec2Shape):
            shape = replace(shape, subsampling=math.prod(stride for _, stride in shape.convolutions))
        return shape

    def latency(self, frame_shift: float, frame_length: float) -> float | None:
        """The algorithmic latency of a streaming model in seconds; None: it needs the whole utterance.

        The longest time from a sound to the outputs of its own encoder frame, on a computer that takes no time: from
        the beginning of a chunk to the end of the last window that its last frame hears.
        """
        if self.chunk is None:
            return None
        subsampling = self.shape.subsampling
        chunk = self.chunk.chunks(frame_shift * subsampling).frames * subsampling
        ahead = frames_ahead(subsampling) - subsampling
        return (chunk + ahead) * frame_shift + (frame_shift + frame_length) / 2


def build_model(
    config: ModelConfig,
    num_features: int,
    vocab_size: int,
    seed: int,
    frame_shift: float = 0.010,
    num_phones: int | None = None,
) -> nn.Module:
    """The network of `config` with fresh weights and `vocab_size` outputs; the same seed gives the same weights.

    `frame_shift` is that of the features in seconds, which `config.chunk` is measured in. `num_phones` counts the
    outputs of `config.phones`, with the blank; None: they are left out.

    `forward(features [B, T, F], lengths [B])` gives log-probabilities `[B, T', V]` and lengths `[B]`.
    The outputs of an utterance don't depend on its padding (to rounding, about 1e-6).
    Raises ConfigError for a decoder or phones of a network that cannot have them.
    """
    from starling.chance import borrowed_generators
    from starling.speech.models.attention import AttentionDecoder
    from starling.speech.models.network import Network, PhoneOutput
    from starling.speech.models.streaming import StreamingNetwork
    from starling.speech.models.transducer import Transducer

    with borrowed_generators(seed):
        network = _ARCHITECTURES.find(config.name).load()(config.shape, num_features, vocab_size)
        if config.decoder is not None:
            own = _checked(network, Network, "decoder")
            width = own.output.in_features
            if isinstance(config.decoder, AttentionConfig):
                own.decoder = AttentionDecoder(config.decoder, width, vocab_size)
            else:
                own.decoder = Transducer(config.decoder, width, vocab_size)
        if config.phones is not None and num_phones is not None:
            own = _checked(network, Network, "phones")
            if own.stacked is None:
                raise ConfigError(f"model.phones: a {type(own).__name__} has no `stacked` layers; leave phones out")
            own.phones = PhoneOutput(own.stacked.width, config.phones.layer, config.shape.dropout, num_phones)
        if config.chunk is not None:
            streaming = _checked(network, StreamingNetwork, "chunk")
            streaming.chunks = config.chunk.chunks(frame_shift * config.shape.subsampling)
    return network


def _checked(network: nn.Module, kind: type[N], key: str) -> N:
    if not isinstance(network, kind):
        raise ConfigError(
            f"model.{key}: the architecture makes a {type(network).__name__}, which is no "
            f"{kind.__module__}.{kind.__name__}; leave {key} out"
        )
    return network


def count_parameters(model: nn.Module) -> int:
    """The number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
