"""The `model:` section of a recipe: the keys that all architectures share, and the sizes and presets of each
architecture. This module does not load torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, ValidationInfo, field_validator, model_validator

from starling.configuration import Config
from starling.errors import require
from starling.speech.tokens import PhonesConfig

if TYPE_CHECKING:
    from torch import nn


Seconds = float
Size = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


def _heads_share_the_width(config: Any) -> Any:
    if config.width % (2 * config.heads):
        raise ValueError(
            f"{config.heads} heads cannot share a width of {config.width}: each needs the same even number of units "
            f"(sines and cosines come in pairs); take a width that is a multiple of {2 * config.heads}"
        )
    return config


@dataclass(frozen=True)
class Chunks:
    """The range of frames on which a frame depends. It extends from the beginning of the chunk that is `left` chunks
    earlier to the end of the frame's own chunk."""

    frames: int  # encoder frames of a chunk
    left: int  # chunks before the frame's own


class ChunkConfig(Config):
    """The chunks of a streaming model. Attention, and the convolutions of a Conformer, use no frames after the chunk.

    The model is trained with chunks of random length and with whole utterances, so that the same weights work with any
    chunk length and with full context. Source: Zhang et al. 2020, "Unified streaming and non-streaming two-pass
    end-to-end model for speech recognition" (arXiv 2012.05481), as used in WeNet.
    """

    seconds: Seconds = Field(default=0.64, gt=0)
    """Length of a chunk in seconds of audio; rounded to encoder frames."""
    left: Size = 4
    """Number of chunks before its own to which a frame attends; an LSTM remembers all earlier chunks."""

    def chunks(self, frame_seconds: Seconds) -> Chunks:
        """The chunks as numbers of encoder frames, each `frame_seconds` long."""
        return Chunks(max(1, round(self.seconds / frame_seconds)), self.left)


class _Beside(Config):
    ctc_weight: float = Field(default=0.3, gt=0, lt=1)
    """Weight of the CTC loss in the total loss; the decoder's loss has the remaining weight."""
    width: int = Field(default=128, ge=2)
    """Number of units of the decoder's layers."""


class AttentionConfig(_Beside):
    """A Transformer decoder, which attends to the encoder's frames and emits one token after another."""

    kind: Literal["attention"]
    """Kind of the decoder: attention, or transducer."""
    layers: Size = 2
    """Number of blocks of the decoder."""
    heads: Size = 4
    """Number of heads in each attention layer; the heads share the width."""
    dropout: Share = 0.1
    """Share of units that are set to 0 in training."""
    label_smoothing: Share = 0.1
    """Share of the target that is spread evenly over all tokens."""

    _heads_fit = model_validator(mode="after")(_heads_share_the_width)


class TransducerConfig(_Beside):
    """A transducer: a predictor, which uses only the last tokens, and a joiner."""

    kind: Literal["transducer"]
    """Kind of the decoder: attention, or transducer."""
    context: Size = 2
    """Number of last tokens that the predictor uses."""


class Architecture(Config):
    """A network and its sizes, which come from a preset and can be overridden one by one.

    Each architecture is a subclass with `NETWORK`, `PRESETS`, and possibly further sizes. This includes architectures
    of other packages, which recipes name as `module:name`.
    """

    NETWORK: ClassVar[str | type[nn.Module]]
    """The class of the network, or its `module:name`. Its arguments are the configuration and the numbers of features
    and outputs."""
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The sizes of each preset, by its name; one preset is `small`. Sizes that a preset leaves out have their
    defaults."""
    CAN_STREAM: ClassVar = False
    """Whether the network is a `starling.speech.models.network.StreamingNetwork`, which `chunk` needs."""
    CAN_HAVE_PHONES: ClassVar = False
    """Whether the network is a `starling.speech.models.network.Network` with `stacked` layers, which `phones` needs."""

    name: str
    """The architecture: blstm, lstm, transformer, conformer, zipformer, deep-speech, blstm-hybrid, dnn-hybrid,
    wav2vec2, whisper, or module:name."""
    preset: str = Field(default="small", validate_default=True)
    """The preset of sizes: tiny, small, or a larger preset of the architecture."""
    subsampling: Literal[1, 2, 4] = 4
    """Number of feature frames per encoder frame."""
    dropout: Share = 0.1
    """Share of units that are set to 0 in training."""
    decoder: Annotated[AttentionConfig | TransducerConfig, Field(discriminator="kind")] | None = None
    """A decoder in addition to CTC: its kind (attention or transducer) and its sizes. null trains CTC alone."""
    phones: PhonesConfig | None = None
    """A second CTC loss, from which a lower layer learns the phones of transcripts, for blstm, lstm, transformer and
    conformer. null leaves it out."""
    chunk: ChunkConfig | None = None
    """Chunks that make an lstm, transformer or conformer a streaming model: their seconds, and the number of earlier
    chunks to which frames attend. With null, every frame depends on the whole utterance."""

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_preset(cls, tree: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in omitted sizes from the preset. They do not count as set by the recipe."""
        if not isinstance(tree, dict):
            return handler(tree)
        config = handler({**cls.beneath(tree), **tree})
        config.model_fields_set.intersection_update(tree)
        return config

    @classmethod
    def beneath(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values that the given keys imply for keys that a recipe leaves out."""
        return cls.PRESETS.get(str(given.get("preset", "small")), {})

    @field_validator("preset")
    @classmethod
    def _preset_is_known(cls, preset: str, info: ValidationInfo) -> str:
        if preset not in cls.PRESETS:
            known = ", ".join(cls.PRESETS) or "none: add PRESETS = {'small': {}} to its class"
            raise ValueError(f"{info.data.get('name')} has no preset {preset!r}; known are {known}")
        return preset

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if self.phones is not None:
            if not self.CAN_HAVE_PHONES:
                raise ValueError(
                    f"phones: {self.name} has no layer for them; blstm, lstm, transformer and conformer have one, and "
                    "classes that set CAN_HAVE_PHONES"
                )
            if self.phones.layer > (layers := getattr(self, "layers", self.phones.layer)):
                raise ValueError(f"phones.layer is {self.phones.layer}, but model.layers is {layers}; lower it")
        if self.chunk is not None:
            if not self.CAN_STREAM:
                raise ValueError(f"chunk: {self.name} cannot stream; lstm, transformer and conformer can")
            if getattr(self, "positions", "rotary") != "rotary" or getattr(self, "span", 0):
                raise ValueError("chunk: needs positions: rotary, and no span; leave them out")
        return self

    def encoder_frames(self, num_frames: int) -> int:
        """The number of encoder frames for `num_frames` feature frames."""
        return frames_after(num_frames, self.subsampling)

    def latency(self, frame_shift: Seconds, frame_length: Seconds) -> Seconds | None:
        """The algorithmic latency of a streaming model in seconds; None if it needs the whole utterance.

        This is the longest time from a sound to the outputs of its encoder frame, without the time of computation. It
        lasts from the beginning of a chunk to the end of the last window on which the chunk's last frame depends.
        """
        if self.chunk is None:
            return None
        chunk = self.chunk.chunks(frame_shift * self.subsampling).frames * self.subsampling
        behind = 4 if self.subsampling == 1 else 6  # feature frames after its own on which an encoder frame depends
        return (chunk + behind - self.subsampling) * frame_shift + (frame_shift + frame_length) / 2


def frames_after(num_frames: int, subsampling: int) -> int:
    """The number of encoder frames for `num_frames` feature frames. Each layer with stride 2 halves the number and
    rounds it up."""
    while subsampling > 1:
        num_frames = (num_frames + 1) // 2
        subsampling //= 2
    return num_frames


def _odd(kernel: int) -> int:
    if kernel % 2 == 0:
        raise ValueError(f"a kernel of {kernel} frames has no middle: take an odd number, such as {kernel + 1}")
    return kernel


Kernel = Annotated[Size, AfterValidator(_odd)]


class StackConfig(Architecture):
    """The sizes of stacked layers and an optional bottleneck before the outputs.

    Dropout is applied before every LSTM layer except the first, before the outputs, and after every dense layer.
    """

    layers: Size = 2
    """Number of LSTM or dense layers."""
    hidden: Size = 128
    """Number of units of an LSTM layer in each direction, or of a dense layer."""
    bottleneck: int = Field(default=0, ge=0)
    """Number of units of a layer before the outputs; 0 leaves it out."""


class RecurrentConfig(StackConfig):
    """The sizes of LSTM layers that follow subsampling convolutions."""

    PRESETS: ClassVar = {
        "tiny": {"layers": 1, "hidden": 32, "channels": 32, "dropout": 0.0},
        "small": {},
        "medium": {"layers": 4, "hidden": 320, "channels": 256, "dropout": 0.2},
        "ibm": {"layers": 6, "hidden": 512, "bottleneck": 256, "channels": 256, "subsampling": 2, "dropout": 0.2},
    }
    CAN_HAVE_PHONES = True

    channels: Size = 128
    """Number of channels of the subsampling convolutions."""


class BlstmConfig(RecurrentConfig):
    """Bidirectional LSTM layers with CTC outputs."""

    NETWORK = "starling.speech.models.recurrent:Blstm"

    name: Literal["blstm"] = "blstm"
    conv2d_channels: int = Field(default=0, ge=0)
    """Number of channels of the first of two convolutions over time and frequency before the layers; the second has
    twice as many. 0 convolves over time only."""
    layer_norm: bool = False
    """Whether LayerNorm follows every LSTM layer, which makes CTC learn sooner."""


class LstmConfig(RecurrentConfig):
    """Forward LSTM layers with CTC outputs."""

    NETWORK = "starling.speech.models.recurrent:LstmCtc"
    CAN_STREAM = True

    name: Literal["lstm"] = "lstm"


class BlstmHybridConfig(StackConfig):
    """Bidirectional LSTM layers with an output for each feature frame, for `loss: frames`."""

    NETWORK = "starling.speech.models.recurrent:Blstm"
    PRESETS: ClassVar = {
        "tiny": {"layers": 1, "hidden": 32, "dropout": 0.0},
        "small": {},
        "ibm": {"layers": 6, "hidden": 512, "bottleneck": 256, "dropout": 0.0},
    }

    name: Literal["blstm-hybrid"] = "blstm-hybrid"
    subsampling: Literal[1] = 1
    hidden: Size = 80


class DnnHybridConfig(StackConfig):
    """Dense layers with an output for each feature frame, for `loss: frames`."""

    NETWORK = "starling.speech.models.recurrent:DnnHybrid"
    PRESETS: ClassVar = {
        "tiny": {"layers": 1, "hidden": 64},
        "small": {},
        "seide": {"layers": 7, "hidden": 2048},
    }

    name: Literal["dnn-hybrid"] = "dnn-hybrid"
    subsampling: Literal[1] = 1
    dropout: Share = 0.0
    layers: Size = 4
    hidden: Size = 256


class DeepSpeechConfig(Architecture):
    """The Deep Speech architecture. Dropout is applied after every dense layer."""

    NETWORK = "starling.speech.models.recurrent:DeepSpeechCtc"
    PRESETS: ClassVar = {
        "tiny": {"hidden": 64, "dropout": 0.0},
        "small": {},
        "original": {"hidden": 2048, "subsampling": 2, "dropout": 0.05},
    }

    name: Literal["deep-speech"] = "deep-speech"
    hidden: Size = 240
    """Number of units of every layer."""
    context: int = Field(default=9, ge=0)
    """Number of feature frames in the context window on either side of an encoder frame's own."""

    @model_validator(mode="after")
    def _every_frame_is_heard(self) -> Self:
        window = 2 * self.context + 1
        if window < self.subsampling:
            raise ValueError(
                f"a context of {self.context} makes a window of {window} feature frames, which would never hear some "
                f"at subsampling {self.subsampling}: take a context of at least {self.subsampling // 2}"
            )
        return self


class BlocksConfig(Architecture):
    """The sizes of blocks with attention. Dropout is applied to the first block's inputs and to the output of each part
    of a block, before the residual connection."""

    CAN_STREAM = CAN_HAVE_PHONES = True

    layers: Size = 4
    """Number of blocks."""
    width: Size = 128
    """Number of units of a frame between blocks."""
    heads: Size = 4
    """Number of attention heads."""
    feed_forward: Size = 512
    """Number of units inside a block's feed-forward parts."""
    positions: Literal["sinusoidal", "rotary", "relative"] = "rotary"
    """How the model uses positions: `rotary` rotates queries and keys, `relative` follows the Conformer paper, and
    `sinusoidal` adds encodings of absolute positions to the frames."""
    channels: Size = 64
    """Number of channels of the subsampling convolutions."""

    _heads_fit = model_validator(mode="after")(_heads_share_the_width)


class TransformerConfig(BlocksConfig):
    """Transformer blocks, which have self-attention."""

    NETWORK = "starling.speech.models.transformer:TransformerCtc"
    PRESETS: ClassVar = {
        "tiny": {"layers": 2, "width": 64, "feed_forward": 256, "channels": 32, "dropout": 0.0},
        "small": {},
        "medium": {"layers": 6, "width": 256, "feed_forward": 1024, "channels": 128},
        "large": {"layers": 12, "width": 448, "heads": 8, "feed_forward": 1792, "channels": 256},
        "huge": {"layers": 16, "width": 720, "heads": 10, "feed_forward": 2880, "channels": 256},
    }

    name: Literal["transformer"] = "transformer"
    positions: Literal["sinusoidal", "rotary"] = "rotary"
    span: int = Field(default=0, ge=0)
    """Number of encoder frames on either side to which a frame attends; with 0, it attends to the whole utterance."""


class ConformerConfig(BlocksConfig):
    """Conformer blocks, which have self-attention and convolution. The presets medium, large and huge have the sizes of
    the paper's S, M and L."""

    NETWORK = "starling.speech.models.conformer:ConformerCtc"
    PRESETS: ClassVar = {
        "tiny": {"layers": 2, "width": 48, "feed_forward": 192, "channels": 32, "dropout": 0.0},
        "small": {},
        "medium": {"layers": 16, "width": 144, "feed_forward": 576, "kernel": 31, "channels": 144},
        "large": {"layers": 16, "width": 256, "feed_forward": 1024, "kernel": 31, "channels": 256},
        "huge": {"layers": 17, "width": 512, "heads": 8, "feed_forward": 2048, "kernel": 31, "channels": 256},
    }

    name: Literal["conformer"] = "conformer"
    width: Size = 96
    feed_forward: Size = 384
    positions: Literal["rotary", "relative"] = "rotary"
    kernel: Kernel = 15
    """Kernel size, in frames, of a block's convolution; must be odd."""


_RATES = (1, 2, 4, 8, 4, 2)


def _stacks(rates: Sequence[int], layers: Sequence[int], widths: Sequence[int]) -> dict[str, Any]:
    return {"stack_rates": rates, "stack_layers": layers, "stack_widths": widths}


class ZipformerConfig(Architecture):
    """Stacks of blocks at several frame rates. Dropout is applied to the output of each part of a block, before the
    residual connection."""

    NETWORK = "starling.speech.models.zipformer:ZipformerCtc"
    PRESETS: ClassVar = {
        "tiny": _stacks((1, 2, 1), (1, 1, 1), (24, 32, 24)) | {"heads": 2, "channels": 24, "dropout": 0.0},
        "small": {},
        "medium": _stacks(_RATES, (1, 1, 1, 1, 1, 1), (96, 160, 192, 256, 192, 160)) | {"channels": 96},
        "large": _stacks(_RATES, (2, 2, 2, 2, 2, 2), (192, 256, 256, 256, 256, 256)) | {"kernel": 31, "channels": 192},
        "huge": _stacks(_RATES, (2, 2, 3, 4, 3, 2), (192, 256, 512, 672, 512, 256)) | {"kernel": 31, "channels": 256},
    }

    name: Literal["zipformer"] = "zipformer"
    stack_rates: tuple[Size, ...] = (1, 2, 4, 2)
    """Number of encoder frames that each stack averages into one."""
    stack_layers: tuple[Size, ...] = (1, 1, 1, 1)
    """Number of blocks in each stack."""
    stack_widths: tuple[Size, ...] = (64, 96, 128, 96)
    """Number of units of a frame in each stack; multiples of 4."""
    heads: Size = 4
    """Number of attention heads in every stack."""
    kernel: Kernel = 15
    """Kernel size of a block's convolution, in frames at the rate of its stack; must be odd."""
    channels: Size = 64
    """Number of channels of the subsampling convolutions."""

    @model_validator(mode="after")
    def _stacks_agree(self) -> Self:
        sizes = {"stack_rates": self.stack_rates, "stack_layers": self.stack_layers, "stack_widths": self.stack_widths}
        if len({len(values) for values in sizes.values()}) > 1 or not self.stack_rates:
            counts = ", ".join(f"{name} {len(values)}" for name, values in sizes.items())
            raise ValueError(f"a zipformer's stacks each need a rate, layers and a width, but there are {counts}")
        if odd := [width for width in self.stack_widths if width % 4]:
            raise ValueError(f"stack_widths: {odd[0]} is not a multiple of 4, which a zipformer's parts need")
        return self


class PublishedConfig(Architecture):
    """A published encoder, whose inputs are waveforms (`features.kind: raw`). Dropout is applied before the outputs."""

    PRESETS: ClassVar = {"small": {}}

    subsampling: Size = 320  # type: ignore[assignment]
    checkpoint: Path | None = None
    """Folder with config.json and model.safetensors of a published model, or the model's name on the Hugging Face
    hub."""
    encoder: dict[str, Any]
    """The configuration of the published model; Starling fills it in from the checkpoint."""

    @classmethod
    def beneath(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if "encoder" in given:
            return {}
        if "checkpoint" not in given:
            raise ValueError(
                f"checkpoint: {cls.model_fields['name'].default} needs one, the folder of a published model or its name"
            )
        return {"encoder": published_config(Path(given["checkpoint"]))}

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> Self:
        if (kind := self.encoder.get("model_type")) != self.name:
            raise ValueError(f"checkpoint: it is a {kind!r}, not a {self.name}")
        if "subsampling" in self.model_fields_set:
            raise ValueError(f"subsampling: {self.name} uses the subsampling of its checkpoint; leave it out")
        return self


_STRIDES = (5, 2, 2, 2, 2, 2, 2)


class Wav2Vec2Config(PublishedConfig):
    """A published wav2vec 2.0 encoder."""

    NETWORK = "starling.speech.models.published:Wav2Vec2Ctc"

    name: Literal["wav2vec2"] = "wav2vec2"

    @classmethod
    def beneath(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        below = super().beneath(given)
        encoder = {**below, **given}["encoder"]
        return {"subsampling": math.prod(encoder.get("conv_stride", _STRIDES)), **below}

    @property
    def convolutions(self) -> list[tuple[int, int]]:
        """Kernel and stride of each convolution over samples, in order."""
        kernels = self.encoder.get("conv_kernel", (10, 3, 3, 3, 3, 2, 2))
        return list(zip(kernels, self.encoder.get("conv_stride", _STRIDES), strict=True))

    def encoder_frames(self, num_frames: int) -> int:
        """The number of encoder frames made of `num_frames` samples."""
        for kernel, stride in self.convolutions:
            num_frames = (num_frames - kernel) // stride + 1
        return max(0, num_frames)


class WhisperConfig(PublishedConfig):
    """The encoder of a published Whisper model."""

    NETWORK = "starling.speech.models.published:WhisperCtc"
    HOP: ClassVar = 160
    """Number of samples from one of Whisper's feature frames to the next; two feature frames make an encoder frame."""

    name: Literal["whisper"] = "whisper"

    def encoder_frames(self, num_frames: int) -> int:
        """The number of encoder frames made of `num_frames` samples."""
        return (num_frames // self.HOP + 1) // 2


BuiltIn = (
    BlstmConfig
    | LstmConfig
    | TransformerConfig
    | ConformerConfig
    | ZipformerConfig
    | DeepSpeechConfig
    | BlstmHybridConfig
    | DnnHybridConfig
    | Wav2Vec2Config
    | WhisperConfig
)
"""Starling's own architectures; `name` selects one of them."""


def published_config(checkpoint: Path) -> dict[str, Any]:
    """The configuration of a published model, read from a folder in the format of `transformers`, or from the Hugging
    Face hub. A model from the hub is kept in the cache of `transformers`.

    Raises ValueError if `checkpoint` is neither, or if the hub cannot be reached and the model is not in the cache.
    """
    name, path = checkpoint.as_posix(), checkpoint / "config.json"
    is_name = not checkpoint.is_absolute() and len(checkpoint.parts) == 2 and ".." not in checkpoint.parts
    try:
        if is_name and not checkpoint.exists():
            require("huggingface", f"model.checkpoint: {name}", ("transformers",))
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(name, "config.json"))
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"checkpoint: {name} is not a folder with a config.json, and the hub has no model of this name "
            f"({reason}). On a machine with network access, fetch it with `hf download NAME`, or use "
            "`--local-dir FOLDER` and give the folder"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"checkpoint: {path} is not a configuration")
    return found
