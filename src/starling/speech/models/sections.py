"""The sections chunk, decoder and checkpoint of a recipe's model, which are checked without loading torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from starling.configuration import Config
from starling.extras import require

Seconds = float


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
    def _heads_share_the_width(self) -> "AttentionConfig":
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
