"""Writes prepared sets of given audio, without a corpus."""

from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from starling.speech.shard_writer import ShardIndex, Spoken, write_index, write_shard
from starling.speech.shards import SetSummary


class SpeechWriter:
    """Writes one set to an empty folder, shard after shard; the set is complete once `finish` has returned."""

    def __init__(self, folder: Path, name: str, sampling_rate: int, shard_size: int = 1000) -> None:
        self._folder, self._name, self._sampling_rate, self._shard_size = folder, name, sampling_rate, shard_size
        (folder / "shar").mkdir(parents=True)
        self._shards: list[ShardIndex] = []
        self._waiting: list[Spoken] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: no file is open."""

    def write(self, utterance_id: str, speaker: str, text: str, audio: NDArray[np.float32]) -> None:
        """Append one utterance; `audio` is [T], mono, in -1..1 (clipped beyond)."""
        if len(self._waiting) == self._shard_size:
            self._write_shard()
        self._waiting.append((utterance_id, speaker, text, audio))

    def finish(self, digest: str, dropped: int = 0, dropped_seconds: float = 0.0) -> SetSummary:
        """Write the index and then the summary."""
        self._write_shard()
        return write_index(
            self._folder, self._name, self._sampling_rate, self._shards, digest, dropped, dropped_seconds
        )

    def _write_shard(self) -> None:
        number, folder = len(self._shards), self._folder / "shar"
        self._shards.append(write_shard(folder, number, self._sampling_rate, self._waiting))
        self._waiting = []
