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
from starling.speech.set_summary import ARRAYS, INDEX_FILES, TEXTS, SetSummary
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
        self._rows: list[tuple[str, str, str, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # an abandoned shard; `finish` closes a complete one
            self._close()

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
        self._rows.append((utterance_id, speaker, text, len(quantised)))

    def finish(self) -> ShardIndex:
        """Write the shard to disk, and return its index."""
        self._close()
        if not self._rows:
            return ShardIndex(self._number, 0, 0)
        audio, cuts = (self._folder / name(self._number) for name in (audio_file, cuts_file))
        sync(audio, cuts)
        with tarfile.open(audio, "r:") as tar:
            places = [(member.offset_data, member.size) for member in tar if not member.name.endswith(".json")]
        with audio.open("rb") as file:
            checks = tuple(crc32(os.pread(file.fileno(), size, offset)) for offset, size in places)
        ids, speakers, texts, num_samples = zip(*self._rows, strict=True)
        offsets, sizes = zip(*places, strict=True)
        num_bytes = audio.stat().st_size, cuts.stat().st_size
        return ShardIndex(self._number, *num_bytes, ids, speakers, texts, num_samples, offsets, sizes, checks)

    def _close(self) -> None:
        try:
            self._audio.close()
        finally:
            if self._cuts is not None:
                self._cuts.close()


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
    pieces = {column: [np.zeros(0, kind)] for column, kind in ARRAYS.items() if column != "durations"}
    files: list[Shard] = []
    speakers: dict[str, int] = {}
    for shard in shards:
        if not shard.ids:
            continue
        new = [speaker for speaker in dict.fromkeys(shard.speakers) if speaker not in speakers]
        speakers |= {speaker: number for number, speaker in enumerate(new, len(speakers))}
        columns: dict[str, Any] = {
            "num_samples": shard.num_samples,
            "offsets": shard.offsets,
            "sizes": shard.sizes,
            "checks": shard.checks,
            "speaker_of": [speakers[speaker] for speaker in shard.speakers],
            "shard_of": [len(files)] * len(shard.ids),
        }
        for column, strings in zip(TEXTS, (shard.ids, shard.texts, new), strict=True):
            encoded = [each.encode() for each in strings]
            columns[column] = np.frombuffer(b"".join(encoded), np.uint8)
            columns[f"{column}_ends"] = [len(each) for each in encoded]
        for column, values in columns.items():
            pieces[column].append(np.asarray(values, ARRAYS[column]))
        files.append(Shard(audio_file(shard.number), shard.audio_bytes))
    arrays = {column: np.concatenate(parts) for column, parts in pieces.items()}
    arrays |= {f"{column}_ends": np.cumsum(arrays[f"{column}_ends"]) for column in TEXTS}
    arrays["durations"] = (arrays["num_samples"] / sampling_rate).astype(np.float32)
    (folder / "index").mkdir(exist_ok=True)
    for column, array in arrays.items():
        np.save(folder / "index" / f"{column}.npy", array, allow_pickle=False)
    summary = SetSummary(
        name=name,
        utterances=len(arrays["durations"]),
        seconds=int(arrays["num_samples"].sum()) / sampling_rate,
        speakers=len(speakers),
        sampling_rate=sampling_rate,
        dropped=dropped,
        dropped_seconds=dropped_seconds,
        digest=digest,
        shards=tuple(files),
        files={name: sha256(folder / "index" / name) for name in INDEX_FILES},
    ).signed()
    (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    return summary
