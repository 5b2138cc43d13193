"""Writes a prepared set: shards, and their index, which `starling.speech.store` reads."""

import gzip
import json
import os
import sys
import tarfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from zlib import crc32

import numpy as np
from lhotse import AudioSource, Recording, SupervisionSegment
from lhotse.shar.writers import AudioTarWriter
from numpy.typing import NDArray

from starling.files import sha256, sync
from starling.speech.set_summary import INDEX_FILES, NUMBERS, SetSummary
from starling.speech.shards import Shard


@dataclass(frozen=True)
class ShardIndex:
    """The index of one shard: the id, speaker and text of each utterance, and the location of its FLAC in the tar."""

    number: int
    audio_bytes: int
    """Size of the tar."""
    cuts_bytes: int
    ids: tuple[str, ...] = ()
    speakers: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    num_samples: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    checks: tuple[int, ...] = ()
    """CRC-32 of each FLAC."""

    @property
    def files(self) -> tuple[tuple[str, int], ...]:
        """The names and sizes in bytes of the shard's files in the folder `shar`; empty if it has no utterances.

        Names depend on the shard's number only, so shards can be written in any order.
        """
        if not self.ids:
            return ()
        return ((audio_file(self.number), self.audio_bytes), (cuts_file(self.number), self.cuts_bytes))


def audio_file(number: int) -> str:
    """The name of a shard's tar."""
    return f"recording.{number:06d}.tar"


def cuts_file(number: int) -> str:
    """The name of a shard's cuts manifest."""
    return f"cuts.{number:06d}.jsonl.gz"


class ShardWriter:
    """Writes one shard to a folder, with the same bytes for the same utterances. An empty shard has no files.

    Audio is stored as 16-bit FLAC, which is lossless for 16-bit recordings.
    """

    def __init__(self, folder: Path, number: int, sampling_rate: int) -> None:
        self._folder, self._number, self._sampling_rate = folder, number, sampling_rate
        self._audio = AudioTarWriter(
            f"{str(folder).replace('%', '%%')}/recording.%06d.tar", sys.maxsize, format="flac", shard_offset=number
        )
        self._cuts: gzip.GzipFile | None = None
        self._ids: list[str] = []
        self._speakers: list[str] = []
        self._texts: list[str] = []
        self._num_samples: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # an abandoned shard; `finish` closes a complete one
            self._close()

    def __len__(self) -> int:
        return len(self._ids)

    def write(self, utterance_id: str, speaker: str, text: str, audio: NDArray[np.float32]) -> None:
        """Append one utterance; `audio` is [T], mono, in -1..1 (clipped beyond)."""
        quantised = np.clip(np.rint(audio * 32768.0), -32768, 32767).astype(np.int16)
        recording = Recording(
            id=utterance_id,
            sources=[AudioSource(type="shar", channels=[0], source="")],
            sampling_rate=self._sampling_rate,
            num_samples=len(quantised),
            duration=len(quantised) / self._sampling_rate,
        )
        cut = recording.to_cut()
        cut.supervisions = [
            SupervisionSegment(utterance_id, utterance_id, 0.0, recording.duration, text=text, speaker=speaker)
        ]
        self._audio.write(utterance_id, quantised[None], self._sampling_rate, manifest=recording)
        if self._cuts is None:
            self._cuts = gzip.GzipFile(self._folder / cuts_file(self._number), "wb", mtime=0)
        self._cuts.write((json.dumps(cut.to_dict(), ensure_ascii=False) + "\n").encode())
        self._ids.append(utterance_id)
        self._speakers.append(speaker)
        self._texts.append(text)
        self._num_samples.append(len(quantised))

    def finish(self) -> ShardIndex:
        """Write the shard to disk, and return its index."""
        self._close()
        if not self._ids:
            return ShardIndex(self._number, 0, 0)
        audio, cuts = (self._folder / name(self._number) for name in (audio_file, cuts_file))
        sync(audio, cuts)
        with tarfile.open(audio, "r:") as tar:
            places = [(member.offset_data, member.size) for member in tar if not member.name.endswith(".json")]
        with audio.open("rb") as file:
            checks = tuple(crc32(os.pread(file.fileno(), size, offset)) for offset, size in places)
        return ShardIndex(
            self._number,
            audio.stat().st_size,
            cuts.stat().st_size,
            tuple(self._ids),
            tuple(self._speakers),
            tuple(self._texts),
            tuple(self._num_samples),
            tuple(offset for offset, _ in places),
            tuple(size for _, size in places),
            checks,
        )

    def _close(self) -> None:
        try:
            self._audio.close()
        finally:
            if self._cuts is not None:
                self._cuts.close()


class SpeechWriter:
    """Writes one set to an empty folder, shard after shard; the set is complete once `finish` has returned."""

    def __init__(self, folder: Path, name: str, sampling_rate: int, shard_size: int = 1000) -> None:
        self._folder, self._name, self._sampling_rate, self._shard_size = folder, name, sampling_rate, shard_size
        (folder / "shar").mkdir(parents=True)
        self._shards: list[ShardIndex] = []
        self._shard = self._next_shard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shard.__exit__(kind, error, trace)

    def write(self, utterance_id: str, speaker: str, text: str, audio: NDArray[np.float32]) -> None:
        """Append one utterance; `audio` is [T], mono, in -1..1 (clipped beyond)."""
        if len(self._shard) == self._shard_size:
            self._shards.append(self._shard.finish())
            self._shard = self._next_shard()
        self._shard.write(utterance_id, speaker, text, audio)

    def finish(self, digest: str, dropped: int = 0, dropped_seconds: float = 0.0) -> SetSummary:
        """Write the index and then the summary."""
        shards = [*self._shards, self._shard.finish()]
        return write_index(self._folder, self._name, self._sampling_rate, shards, digest, dropped, dropped_seconds)

    def _next_shard(self) -> ShardWriter:
        return ShardWriter(self._folder / "shar", len(self._shards), self._sampling_rate)


class _Strings:
    """Strings as one block of UTF-8 bytes and the end position of each string."""

    def __init__(self) -> None:
        self._block = bytearray()
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._ends)

    def append(self, string: str) -> None:
        self._block += string.encode()
        self._ends.append(len(self._block))

    def save(self, folder: Path, name: str) -> None:
        np.save(folder / f"{name}_ends.npy", np.asarray(self._ends, np.int64), allow_pickle=False)
        np.save(folder / f"{name}.npy", np.frombuffer(bytes(self._block), np.uint8), allow_pickle=False)


class _Index:
    """The index arrays over all shards of a set."""

    def __init__(self) -> None:
        self.files: list[Shard] = []
        self.ids, self.texts, self.speakers = _Strings(), _Strings(), _Strings()
        self._places: dict[str, int] = {}
        self._pieces: dict[str, list[NDArray[Any]]] = {
            name: [np.zeros(0, kind)] for name, kind in NUMBERS.items() if name != "durations"
        }

    def add(self, shard: ShardIndex) -> None:
        for speaker in shard.speakers:
            if speaker not in self._places:
                self._places[speaker] = len(self._places)
                self.speakers.append(speaker)
        for name, text in zip(shard.ids, shard.texts, strict=True):
            self.ids.append(name)
            self.texts.append(text)
        columns = {
            "num_samples": shard.num_samples,
            "offsets": shard.offsets,
            "sizes": shard.sizes,
            "checks": shard.checks,
            "speaker_of": [self._places[speaker] for speaker in shard.speakers],
            "shard_of": [len(self.files)] * len(shard.ids),
        }
        for column, values in columns.items():
            self._pieces[column].append(np.asarray(values, self._pieces[column][0].dtype))
        self.files.append(Shard(audio_file(shard.number), shard.audio_bytes))

    def save(self, folder: Path, sampling_rate: int) -> int:
        """Write the arrays; returns the total number of samples."""
        numbers = {name: np.concatenate(pieces) for name, pieces in self._pieces.items()}
        numbers["durations"] = (numbers["num_samples"] / sampling_rate).astype(np.float32)
        for name, array in numbers.items():
            np.save(folder / f"{name}.npy", array, allow_pickle=False)
        for name in ("ids", "texts", "speakers"):
            getattr(self, name).save(folder, name)
        return int(numbers["num_samples"].sum())


def write_index(
    folder: Path,
    name: str,
    sampling_rate: int,
    shards: Iterable[ShardIndex],
    digest: str,
    dropped: int = 0,
    dropped_seconds: float = 0.0,
) -> SetSummary:
    """Write the index over all shards of a set, in the given order, and then the summary."""
    index = _Index()
    for shard in shards:
        if shard.ids:
            index.add(shard)
    (folder / "index").mkdir(exist_ok=True)
    num_samples = index.save(folder / "index", sampling_rate)
    summary = SetSummary(
        name=name,
        utterances=len(index.ids),
        seconds=num_samples / sampling_rate,
        speakers=len(index.speakers),
        sampling_rate=sampling_rate,
        dropped=dropped,
        dropped_seconds=dropped_seconds,
        digest=digest,
        shards=tuple(index.files),
        files={name: sha256(folder / "index" / name) for name in INDEX_FILES},
    ).signed()
    (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    return summary
