"""Writes the shards and the index of a prepared set, which `starling.speech.store` reads."""

import gzip
import json
import os
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from lhotse import AudioSource, Recording, SupervisionSegment
from lhotse.shar.writers import AudioTarWriter
from numpy.typing import NDArray

from starling.files import sha256, sync
from starling.speech.shards import ARRAYS, INDEX_FILES, TEXTS, SetSummary, Shard

Spoken = tuple[str, str, str, NDArray[np.float32]]
"""The id, speaker, text and audio of an utterance. The audio is `[T]`, mono, and clipped to -1..1."""


@dataclass(frozen=True)
class ShardIndex:
    """The index of one shard: the id, speaker and text of each utterance, and the location of its FLAC in the tar."""

    number: int
    audio_bytes: int
    """Size of the tar in bytes."""
    cuts_bytes: int
    ids: tuple[str, ...] = ()
    speakers: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    num_samples: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    checks: tuple[int, ...] = ()
    """CRC-32 of each FLAC file."""

    @property
    def files(self) -> tuple[tuple[str, int], ...]:
        """The names and sizes in bytes of the shard's files in the folder `shar`; empty if it has no utterances.

        The names depend only on the shard's number, so shards can be written in any order.
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


def write_shard(folder: Path, number: int, sampling_rate: int, utterances: Iterable[Spoken]) -> ShardIndex:
    """Write one shard to a folder, and return the shard's index. The same utterances produce the same bytes.

    Audio is stored as 16-bit FLAC, which is lossless for 16-bit recordings. An empty shard has no files.
    """
    pattern = f"{str(folder).replace('%', '%%')}/recording.%06d.tar"
    audio, cuts = folder / audio_file(number), folder / cuts_file(number)
    rows: list[tuple[str, str, str, int]] = []
    with (
        AudioTarWriter(pattern, sys.maxsize, format="flac", shard_offset=number) as tar,
        gzip.GzipFile(cuts, "wb", mtime=0) as manifest,
    ):
        for name, speaker, text, samples in utterances:
            quantised = np.clip(np.rint(samples * 32768.0), -32768, 32767).astype(np.int16)
            recording = Recording(
                id=name,
                sources=[AudioSource(type="shar", channels=[0], source="")],
                sampling_rate=sampling_rate,
                num_samples=len(quantised),
                duration=len(quantised) / sampling_rate,
            )
            cut = recording.to_cut()
            cut.supervisions = [SupervisionSegment(name, name, 0.0, recording.duration, text=text, speaker=speaker)]
            tar.write(name, quantised[None], sampling_rate, manifest=recording)
            manifest.write((json.dumps(cut.to_dict(), ensure_ascii=False) + "\n").encode())
            rows.append((name, speaker, text, len(quantised)))
    if not rows:
        cuts.unlink()
        return ShardIndex(number, 0, 0)
    sync(audio, cuts)
    with tarfile.open(audio, "r:") as written:
        places = [(member.offset_data, member.size) for member in written if not member.name.endswith(".json")]
    with audio.open("rb") as file:
        checks = tuple(crc32(os.pread(file.fileno(), size, offset)) for offset, size in places)
    ids, speakers, texts, num_samples = zip(*rows, strict=True)
    offsets, sizes = zip(*places, strict=True)
    num_bytes = audio.stat().st_size, cuts.stat().st_size
    return ShardIndex(number, *num_bytes, ids, speakers, texts, num_samples, offsets, sizes, checks)


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
