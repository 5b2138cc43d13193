"""The section `model.chunk` of a recipe: a model that hears an utterance chunk by chunk, while it is spoken."""

from dataclasses import dataclass

from pydantic import Field

from starling.configuration import Config

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

    seconds: Seconds = Field(default=0.64, gt=0, description="audio of a chunk; rounded to encoder frames")
    left: int = Field(
        default=4, ge=1, description="chunks before its own that a frame attends to; an LSTM remembers all of them"
    )

    def chunks(self, frame_seconds: Seconds) -> Chunks:
        """In encoder frames of `frame_seconds`."""
        return Chunks(max(1, round(self.seconds / frame_seconds)), self.left)
