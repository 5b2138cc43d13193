"""Sizes and presets of acoustic models, and the sections of a recipe that say which; all are checked without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from starling.configuration import Config
from starling.extras import require

if TYPE_CHECKING:
    from torch import nn

Seconds = float
Positions = Literal["sinusoidal", "rotary", "relative"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Every size of a network; each architecture adds its own."""

    subsampling: int  # feature frames per encoder frame: 1, 2 or 4
    dropout: float

    def encoder_frames(self, num_frames: int) -> int:
        """Encoder frames made of `num_frames` feature frames."""
        return frames_after(num_frames, self.subsampling)


@dataclass(frozen=True, kw_only=True)
class StackShape(ModelShape):
    """Every size of stacked layers, an optional bottleneck, and outputs.

    Dropout is before every LSTM layer but the first, and before the outputs; it is behind every dense layer.
    """

    layers: int
    hidden: int  # units of a layer; of an LSTM layer, per direction
    bottleneck: int  # units between the last layer and the outputs; 0: none


@dataclass(frozen=True, kw_only=True)
class RecurrentShape(StackShape):
    """Every size of a stack of LSTM layers behind convolutions."""

    channels: int  # output channels of every subsampling layer


@dataclass(frozen=True, kw_only=True)
class BlstmShape(RecurrentShape):
    """Every size of a stack of bidirectional LSTM layers."""

    conv2d_channels: int = 0  # channels of the first of two convolutions over time and frequency; 0: over time alone


@dataclass(frozen=True, kw_only=True)
class DeepSpeechShape(ModelShape):
    """Every size of Deep Speech; dropout is behind every dense layer.

    Raises ValueError for a context window that leaves feature frames out.
    """

    hidden: int  # units of every layer
    context: int  # feature frames heard on either side of an encoder frame's own

    def __post_init__(self) -> None:
        window = 2 * self.context + 1
        if window < self.subsampling:
            raise ValueError(
                f"a context of {self.context} makes a window of {window} feature frames, which would never hear some "
                f"at subsampling {self.subsampling}: take a context of at least {self.subsampling // 2}"
            )


@dataclass(frozen=True, kw_only=True)
class AttentionShape(ModelShape):
    """Every size of blocks with attention; dropout is on the first block's inputs and on what each part of a block
    adds.

    Raises ValueError for a width that the heads cannot share.
    """

    layers: int  # blocks
    width: int  # units of a frame, between the blocks
    heads: int  # of the attention; they share the width
    feed_forward: int  # units inside a block's feed-forward parts
    positions: Positions = "rotary"
    channels: int  # output channels of every subsampling layer
    subsampling: int = 4
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"{self.heads} heads cannot share a width of {self.width}: each needs the same even number of units "
                f"(sines and cosines come in pairs); take a width that is a multiple of {2 * self.heads}"
            )


@dataclass(frozen=True, kw_only=True)
class TransformerShape(AttentionShape):
    """Every size of a Transformer. Raises ValueError also for positions that only a Conformer has."""

    span: int = 0  # encoder frames that a frame attends to on either side; 0: all of its utterance

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions == "relative":
            raise ValueError("positions: a transformer has sinusoidal or rotary ones; relative ones are a conformer's")


@dataclass(frozen=True, kw_only=True)
class ConformerShape(AttentionShape):
    """Every size of a Conformer. Raises ValueError also for an even kernel, and positions that it has not."""

    kernel: int  # encoder frames that a block's convolution hears

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_kernel(self.kernel)
        if self.positions == "sinusoidal":
            raise ValueError("positions: a conformer has relative or rotary ones; sinusoidal ones are a transformer's")


@dataclass(frozen=True, kw_only=True)
class ZipformerShape(ModelShape):
    """Every size of a Zipformer; dropout is on what each part of a block adds.

    Raises ValueError for stacks that don't agree in number, and for an even kernel.
    """

    stack_rates: tuple[int, ...]  # encoder frames that a stack joins into one
    stack_layers: tuple[int, ...]  # blocks of each stack
    stack_widths: tuple[int, ...]  # units of a frame in each stack
    heads: int  # of the attention, in every stack
    kernel: int  # frames that a convolution hears, at the rate of its stack
    channels: int  # output channels of every subsampling layer

    def __post_init__(self) -> None:
        _check_kernel(self.kernel)
        sizes = {"stack_rates": self.stack_rates, "stack_layers": self.stack_layers, "stack_widths": self.stack_widths}
        if len({len(values) for values in sizes.values()}) > 1 or not self.stack_rates:
            counts = ", ".join(f"{name} {len(values)}" for name, values in sizes.items())
            raise ValueError(f"a zipformer's stacks each need a rate, layers and a width, but there are {counts}")
        if odd := [width for width in self.stack_widths if width % 4]:
            raise ValueError(f"stack_widths: {odd[0]} is not a multiple of 4, which a zipformer's parts need")


@dataclass(frozen=True, kw_only=True)
class PublishedShape(ModelShape):
    """A published encoder, which `model.checkpoint` names and which hears waveforms (`features.kind: raw`); dropout is
    before the outputs."""

    encoder: dict[str, Any] | None = None  # its configuration, as `transformers` has it; None: not known yet


@dataclass(frozen=True, kw_only=True)
class Wav2Vec2Shape(PublishedShape):
    """A published wav2vec 2.0."""

    @property
    def convolutions(self) -> list[tuple[int, int]]:
        """Kernel and stride of each convolution over samples."""
        encoder = self.encoder or {}
        kernels = encoder.get("conv_kernel", (10, 3, 3, 3, 3, 2, 2))
        return list(zip(kernels, encoder.get("conv_stride", (5, 2, 2, 2, 2, 2, 2)), strict=True))

    def encoder_frames(self, num_frames: int) -> int:
        """Encoder frames made of so many samples."""
        for kernel, stride in self.convolutions:
            num_frames = (num_frames - kernel) // stride + 1
        return max(0, num_frames)


@dataclass(frozen=True, kw_only=True)
class WhisperShape(PublishedShape):
    """The encoder of a published Whisper."""

    HOP: ClassVar[int] = 160  # samples from one of its feature frames to the next, of which two make an encoder frame

    def encoder_frames(self, num_frames: int) -> int:
        """Encoder frames made of so many samples."""
        return (num_frames // self.HOP + 1) // 2


def _check_kernel(kernel: int) -> None:
    if kernel % 2 == 0:
        raise ValueError(f"a kernel of {kernel} frames has no middle: take an odd number, such as {kernel + 1}")


_RECURRENT = {
    "tiny": RecurrentShape(layers=1, hidden=32, bottleneck=0, channels=32, subsampling=4, dropout=0.0),
    "small": RecurrentShape(layers=2, hidden=128, bottleneck=0, channels=128, subsampling=4, dropout=0.1),
    "medium": RecurrentShape(layers=4, hidden=320, bottleneck=0, channels=256, subsampling=4, dropout=0.2),
    "ibm": RecurrentShape(layers=6, hidden=512, bottleneck=256, channels=256, subsampling=2, dropout=0.2),
}
_BLSTM = {name: BlstmShape(**asdict(shape)) for name, shape in _RECURRENT.items()}
_HYBRID = {
    "tiny": StackShape(layers=1, hidden=32, bottleneck=0, subsampling=1, dropout=0.0),
    "small": StackShape(layers=2, hidden=80, bottleneck=0, subsampling=1, dropout=0.1),
    "ibm": StackShape(layers=6, hidden=512, bottleneck=256, subsampling=1, dropout=0.0),
}
_DNN_HYBRID = {
    "tiny": StackShape(layers=1, hidden=64, bottleneck=0, subsampling=1, dropout=0.0),
    "small": StackShape(layers=4, hidden=256, bottleneck=0, subsampling=1, dropout=0.0),
    "seide": StackShape(layers=7, hidden=2048, bottleneck=0, subsampling=1, dropout=0.0),
}
_DEEP_SPEECH = {
    "tiny": DeepSpeechShape(hidden=64, context=9, subsampling=4, dropout=0.0),
    "small": DeepSpeechShape(hidden=240, context=9, subsampling=4, dropout=0.1),
    "original": DeepSpeechShape(hidden=2048, context=9, subsampling=2, dropout=0.05),
}
_TRANSFORMER = {
    "tiny": TransformerShape(layers=2, width=64, heads=4, feed_forward=256, channels=32, dropout=0.0),
    "small": TransformerShape(layers=4, width=128, heads=4, feed_forward=512, channels=64),
    "medium": TransformerShape(layers=6, width=256, heads=4, feed_forward=1024, channels=128),
    "large": TransformerShape(layers=12, width=448, heads=8, feed_forward=1792, channels=256),
    "huge": TransformerShape(layers=16, width=720, heads=10, feed_forward=2880, channels=256),
}
_CONFORMER = {
    "tiny": ConformerShape(layers=2, width=48, heads=4, feed_forward=192, kernel=15, channels=32, dropout=0.0),
    "small": ConformerShape(layers=4, width=96, heads=4, feed_forward=384, kernel=15, channels=64),
    # the last three have the sizes of the paper's S, M and L
    "medium": ConformerShape(layers=16, width=144, heads=4, feed_forward=576, kernel=31, channels=144),
    "large": ConformerShape(layers=16, width=256, heads=4, feed_forward=1024, kernel=31, channels=256),
    "huge": ConformerShape(layers=17, width=512, heads=8, feed_forward=2048, kernel=31, channels=256),
}
_ZIPFORMER = {
    name: ZipformerShape(
        stack_rates=rates,
        stack_layers=layers,
        stack_widths=widths,
        heads=heads,
        kernel=kernel,
        channels=channels,
        subsampling=4,
        dropout=0.0 if name == "tiny" else 0.1,
    )
    for name, rates, layers, widths, heads, kernel, channels in (
        ("tiny", (1, 2, 1), (1, 1, 1), (24, 32, 24), 2, 15, 24),
        ("small", (1, 2, 4, 2), (1, 1, 1, 1), (64, 96, 128, 96), 4, 15, 64),
        ("medium", (1, 2, 4, 8, 4, 2), (1, 1, 1, 1, 1, 1), (96, 160, 192, 256, 192, 160), 4, 15, 96),
        ("large", (1, 2, 4, 8, 4, 2), (2, 2, 2, 2, 2, 2), (192, 256, 256, 256, 256, 256), 4, 31, 192),
        ("huge", (1, 2, 4, 8, 4, 2), (2, 2, 3, 4, 3, 2), (192, 256, 512, 672, 512, 256), 4, 31, 256),
    )
}


@dataclass(frozen=True)
class Architecture:
    """A kind of network as recipes see it."""

    network: str | Callable[..., nn.Module]
    """`network(shape, num_features, vocab_size)`, or its `module:name`; the shape is of the presets' class."""
    presets: Mapping[str, ModelShape]
    """Complete sets of sizes, by name; all of one class, and one of them is `small`."""
    can_stream: bool = False
    """Whether the network is a `starling.speech.models.streaming.StreamingNetwork`, which `model.chunk` needs."""
    can_have_phones: bool = False
    """Whether the network is a `starling.speech.models.network.Network` with `stacked` layers, which `model.phones`
    needs."""
    is_hybrid: bool = False
    """Whether the network has an output for each feature frame, hence no subsampling."""

    @property
    def sizes(self) -> list[str]:
        """The names of the sizes that it has: its own first, then those that every network has."""
        common = [field.name for field in fields(ModelShape)]
        return [field.name for field in fields(self.presets["small"]) if field.name not in common] + common

    def load(self) -> Callable[..., nn.Module]:
        """What makes the network, which needs torch; what a recipe says of it does not."""
        if not isinstance(self.network, str):
            return self.network
        return cast(Callable[..., "nn.Module"], resolve_name(self.network))


_HERE = "starling.speech.models"
MODELS = {
    "blstm": Architecture(f"{_HERE}.recurrent:Blstm", _BLSTM, can_have_phones=True),
    "lstm": Architecture(f"{_HERE}.recurrent:LstmCtc", _RECURRENT, can_stream=True, can_have_phones=True),
    "transformer": Architecture(
        f"{_HERE}.transformer:TransformerCtc", _TRANSFORMER, can_stream=True, can_have_phones=True
    ),
    "conformer": Architecture(f"{_HERE}.conformer:ConformerCtc", _CONFORMER, can_stream=True, can_have_phones=True),
    "zipformer": Architecture(f"{_HERE}.zipformer:ZipformerCtc", _ZIPFORMER),
    "deep-speech": Architecture(f"{_HERE}.recurrent:DeepSpeechCtc", _DEEP_SPEECH),
    "blstm-hybrid": Architecture(f"{_HERE}.recurrent:Blstm", _HYBRID, is_hybrid=True),
    "dnn-hybrid": Architecture(f"{_HERE}.recurrent:DnnHybrid", _DNN_HYBRID, is_hybrid=True),
}


PUBLISHED = {
    "wav2vec2": Architecture(f"{_HERE}.published:Wav2Vec2Ctc", {"small": Wav2Vec2Shape(subsampling=320, dropout=0.1)}),
    "whisper": Architecture(f"{_HERE}.published:WhisperCtc", {"small": WhisperShape(subsampling=320, dropout=0.1)}),
}
"""Those whose sizes are a checkpoint's."""


def frames_after(num_frames: int, subsampling: int) -> int:
    """Encoder frames made of `num_frames` feature frames: halved, rounded up, once per layer of stride 2."""
    while subsampling > 1:
        num_frames = (num_frames + 1) // 2
        subsampling //= 2
    return num_frames


def frames_ahead(subsampling: int) -> int:
    """Feature frames behind its own that an encoder frame hears through the two convolutions in front."""
    return 4 if subsampling == 1 else 6


@dataclass(frozen=True)
class Chunks:
    """How far a frame hears: to the end of its chunk, and back to the beginning of the chunk `left` before it."""

    frames: int  # encoder frames of a chunk
    left: int  # chunks before its own


class ChunkConfig(Config):
    """A streaming model: attention, and the convolutions of a Conformer, hear no further than their chunk.

    It is trained with chunks of random length, and with whole utterances, so that the same weights serve any chunk and
    full context. Source: Zhang et al. 2020, "Unified streaming and non-streaming two-pass end-to-end model for speech
    recognition" (arXiv 2012.05481), known from WeNet.
    """

    seconds: Seconds = Field(default=0.64, gt=0)
    """Audio of a chunk; rounded to encoder frames."""
    left: int = Field(default=4, ge=1)
    """Chunks before its own that a frame attends to; an LSTM remembers all of them."""

    def chunks(self, frame_seconds: Seconds) -> Chunks:
        """In encoder frames of `frame_seconds`."""
        return Chunks(max(1, round(self.seconds / frame_seconds)), self.left)


class _Beside(Config):
    ctc_weight: float = Field(default=0.3, gt=0, lt=1)
    """Share of the CTC loss in the loss; the decoder's has the rest."""
    width: int = Field(default=128, ge=2)
    """Units of the decoder's layers."""


class AttentionConfig(_Beside):
    """A Transformer decoder, which attends to the encoder's frames and emits token after token."""

    kind: Literal["attention"]
    """The kind: attention, or transducer."""
    layers: int = Field(default=2, ge=1)
    """Blocks of the decoder."""
    heads: int = Field(default=4, ge=1)
    """Heads of each attention; they share the width."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Share of units that are set to 0 in training."""
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    """Share of the target that is spread evenly over all tokens."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> AttentionConfig:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"{self.heads} heads cannot share a width of {self.width}: take a multiple of {2 * self.heads}"
            )
        return self


class TransducerConfig(_Beside):
    """A transducer: a predictor, which knows the last tokens alone, and a joiner."""

    kind: Literal["transducer"]
    """The kind: attention, or transducer."""
    context: int = Field(default=2, ge=1)
    """Last tokens that the predictor knows."""


DecoderConfig = Annotated[AttentionConfig | TransducerConfig, Field(discriminator="kind")]


def published_config(checkpoint: Path) -> dict[str, Any]:
    """The configuration in a folder in the format of `transformers`, or of a model of the Hugging Face hub, which is
    kept in the cache of `transformers`.

    Raises ValueError for anything else, and without a network if the model is not in the cache.
    """
    path = checkpoint / "config.json"
    try:
        if not path.is_file() and not checkpoint.exists() and _is_name(checkpoint):
            require("huggingface", f"model.checkpoint: {checkpoint.as_posix()}", ("transformers",))
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(checkpoint.as_posix(), "config.json"))
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"checkpoint: {checkpoint.as_posix()} is no folder with a config.json, and the hub of models gives none of "
            f"this name ({reason}). Where there is a network, fetch it with `hf download NAME`, or with "
            "`--local-dir FOLDER` and give the folder"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"checkpoint: {path} is no configuration")
    return found


def _is_name(checkpoint: Path) -> bool:
    """Whether it may be `owner/model`."""
    return not checkpoint.is_absolute() and len(checkpoint.parts) == 2 and ".." not in checkpoint.parts
