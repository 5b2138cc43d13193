"""The keys that the `model:` sections of all architectures share. This module does not load torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationInfo, field_validator, model_validator

from starling.configuration import Config
from starling.speech.phones import PhonesConfig

if TYPE_CHECKING:
    from torch import nn

Seconds = float
Size = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


def check_heads(heads: int, width: int) -> None:
    if width % (2 * heads):
        raise ValueError(
            f"{heads} heads cannot share a width of {width}: each needs the same even number of units "
            f"(sines and cosines come in pairs); take a width that is a multiple of {2 * heads}"
        )


@dataclass(frozen=True)
class Chunks:
    """The range that a frame hears: to the end of its chunk, and back to the beginning of the chunk `left` before
    it."""

    frames: int  # encoder frames of a chunk
    left: int  # chunks before its own


class ChunkConfig(Config):
    """A streaming model: attention, and the convolutions of a Conformer, hear no further than their chunk.

    It is trained with chunks of random length, and with whole utterances, so that the same weights serve any chunk and
    full context. Source: Zhang et al. 2020, "Unified streaming and non-streaming two-pass end-to-end model for speech
    recognition" (arXiv 2012.05481), as used in WeNet.
    """

    seconds: Seconds = Field(default=0.64, gt=0)
    """Length of a chunk in seconds of audio; rounded to encoder frames."""
    left: Size = 4
    """Number of chunks before its own that a frame attends to; an LSTM remembers all of them."""

    def chunks(self, frame_seconds: Seconds) -> Chunks:
        """The chunks in encoder frames of `frame_seconds`."""
        return Chunks(max(1, round(self.seconds / frame_seconds)), self.left)


class _Beside(Config):
    ctc_weight: float = Field(default=0.3, gt=0, lt=1)
    """Share of the CTC loss in the loss; the decoder's loss has the rest."""
    width: int = Field(default=128, ge=2)
    """Number of units of the decoder's layers."""


class AttentionConfig(_Beside):
    """A Transformer decoder, which attends to the encoder's frames and emits one token after another."""

    kind: Literal["attention"]
    """Kind of the decoder: attention, or transducer."""
    layers: Size = 2
    """Number of blocks of the decoder."""
    heads: Size = 4
    """Number of heads of each attention; they share the width."""
    dropout: Share = 0.1
    """Share of units that are set to 0 in training."""
    label_smoothing: Share = 0.1
    """Share of the target that is spread evenly over all tokens."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Self:
        check_heads(self.heads, self.width)
        return self


class TransducerConfig(_Beside):
    """A transducer: a predictor, which knows only the last tokens, and a joiner."""

    kind: Literal["transducer"]
    """Kind of the decoder: attention, or transducer."""
    context: Size = 2
    """Number of last tokens that the predictor knows."""


class Architecture(Config):
    """A network and its sizes, which come from a preset and can be overridden one by one.

    Each architecture inherits from this class, including those of other packages, which recipes name as `module:name`;
    it has `NETWORK`, `PRESETS`, and possibly further sizes.
    """

    NETWORK: ClassVar[str | type[nn.Module]]
    """The network, or its `module:name`; it is built from the configuration and the numbers of features and outputs."""
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Sizes by the name of the preset, one of which is `small`; sizes that a preset leaves out have their defaults."""
    CAN_STREAM: ClassVar = False
    """Whether the network is a `starling.speech.models.network.StreamingNetwork`, which `chunk` needs."""
    CAN_HAVE_PHONES: ClassVar = False
    """Whether the network is a `starling.speech.models.network.Network` with `stacked` layers, which `phones` needs."""

    name: str
    """The architecture: blstm, lstm, transformer, conformer, zipformer, deep-speech, blstm-hybrid, dnn-hybrid,
    wav2vec2, whisper, or module:name."""
    preset: str = "small"
    """The preset: tiny, small, or a larger preset of the architecture."""
    subsampling: Literal[1, 2, 4] = 4
    """Number of feature frames per encoder frame."""
    dropout: Share = 0.1
    """Share of units that are set to 0 in training."""
    decoder: Annotated[AttentionConfig | TransducerConfig, Field(discriminator="kind")] | None = None
    """A decoder beside CTC: its kind (attention or transducer) and its sizes; null trains CTC alone."""
    phones: PhonesConfig | None = None
    """A second CTC loss, with which a lower layer learns the phones of transcripts; needs blstm, lstm, transformer or
    conformer. null leaves it out."""
    chunk: ChunkConfig | None = None
    """Chunks that make an lstm, transformer or conformer a streaming model: their seconds, and the number of chunks
    before them; with null, every frame hears the whole utterance."""

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_preset(cls, tree: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Take sizes that are left out from the preset; they do not count as set."""
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
            raise ValueError(f"{info.data.get('name')} has no preset {preset!r}; known are {', '.join(cls.PRESETS)}")
        return preset

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if self.phones is not None:
            if not self.CAN_HAVE_PHONES:
                raise ValueError(
                    f"phones: {self.name} has no layer for them; blstm, lstm, transformer and conformer have one"
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
        """The number of encoder frames made of `num_frames` feature frames."""
        return frames_after(num_frames, self.subsampling)

    def latency(self, frame_shift: Seconds, frame_length: Seconds) -> Seconds | None:
        """The algorithmic latency of a streaming model in seconds; None if it needs the whole utterance.

        This is the longest time from a sound to the outputs of its own encoder frame, on a computer that takes no time:
        from the beginning of a chunk to the end of the last window that its last frame hears.
        """
        if self.chunk is None:
            return None
        chunk = self.chunk.chunks(frame_shift * self.subsampling).frames * self.subsampling
        behind = 4 if self.subsampling == 1 else 6  # feature frames behind its own that an encoder frame hears
        return (chunk + behind - self.subsampling) * frame_shift + (frame_shift + frame_length) / 2


def frames_after(num_frames: int, subsampling: int) -> int:
    """The number of encoder frames made of `num_frames` feature frames: halved, rounded up, once per layer of stride
    2."""
    while subsampling > 1:
        num_frames = (num_frames + 1) // 2
        subsampling //= 2
    return num_frames
