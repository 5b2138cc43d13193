"""Writes prepared sets of given audio, without a corpus."""

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from starling.speech.set_summary import SetSummary
from starling.speech.shard_writer import ShardIndex, ShardWriter, write_index


class SpeechWriter:
    """Writes one set to an empty folder, shard after shard; the set is complete once `finish` has returned."""

    def __init__(self, folder: Path, name: str, sampling_rate: int, shard_size: int = 1000) -> None:
        self._folder, self._name, self._sampling_rate, self._shard_size = folder, name, sampling_rate, shard_size
        (folder / "shar").mkdir(parents=True)
        self._shards: list[ShardIndex] = []
        self._shard, self._in_shard = self._next_shard(), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shard.__exit__(kind, error, trace)

    def write(self, utterance_id: str, speaker: str, text: str, audio: NDArray[np.float32]) -> None:
        """Append one utterance; `audio` is [T], mono, in -1..1 (clipped beyond)."""
        if self._in_shard == self._shard_size:
            self._shards.append(self._shard.finish())
            self._shard, self._in_shard = self._next_shard(), 0
        self._shard.write(utterance_id, speaker, text, audio)
        self._in_shard += 1

    def finish(self, digest: str, dropped: int = 0, dropped_seconds: float = 0.0) -> SetSummary:
        """Write the index and then the summary."""
        shards = [*self._shards, self._shard.finish()]
        return write_index(self._folder, self._name, self._sampling_rate, shards, digest, dropped, dropped_seconds)

    def _next_shard(self) -> ShardWriter:
        return ShardWriter(self._folder / "shar", len(self._shards), self._sampling_rate)
