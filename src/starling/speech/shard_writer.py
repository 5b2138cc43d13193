"""Writing a prepared set: shards, and the index beside them, which `starling.speech.store` reads."""

import json
import tarfile
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from lhotse import AudioSource, MonoCut, Recording, SupervisionSegment
from lhotse.shar.writers import AudioTarWriter, JsonlShardWriter
from numpy.typing import NDArray

from starling.speech.store import SetSummary, Shard


class SpeechWriter:
    """Writes one set into an empty folder; the set exists once `finish` has returned.

    Audio is kept as 16-bit FLAC, so that 16-bit recordings come back to the bit.
    """

    def __init__(self, folder: Path, name: str, sampling_rate: int, shard_size: int = 1000) -> None:
        self._folder, self._name, self._sampling_rate = folder, name, sampling_rate
        (folder / "shar").mkdir(parents=True)
        (folder / "index").mkdir()
        pattern = str(folder / "shar")
        self._audio = AudioTarWriter(f"{pattern}/recording.%06d.tar", shard_size, format="flac")
        self._cuts = JsonlShardWriter(f"{pattern}/cuts.%06d.jsonl.gz", shard_size)
        self._num_samples: list[int] = []
        self._ids: list[str] = []
        self._texts: list[str] = []
        self._speaker_of: list[int] = []
        self._speakers: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._audio.close()
        self._cuts.close()

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
        supervision = SupervisionSegment(
            id=utterance_id,
            recording_id=utterance_id,
            start=0.0,
            duration=recording.duration,
            text=text,
            speaker=speaker,
        )
        self._audio.write(utterance_id, quantised[None], self._sampling_rate, manifest=recording)
        self._cuts.write(
            MonoCut(
                id=utterance_id,
                start=0.0,
                duration=recording.duration,
                channel=0,
                supervisions=[supervision],
                recording=recording,
            )
        )
        self._ids.append(utterance_id)
        self._texts.append(text)
        self._num_samples.append(len(quantised))
        self._speaker_of.append(self._speakers.setdefault(speaker, len(self._speakers)))

    def finish(self, digest: str, dropped: int = 0, dropped_seconds: float = 0.0) -> SetSummary:
        """Write the index and, last, the summary."""
        self._close()
        shards, shard_of, offsets, sizes = self._places()
        samples = np.asarray(self._num_samples, np.int64)
        numbers: dict[str, NDArray[Any]] = {
            "durations": (samples / self._sampling_rate).astype(np.float32),
            "num_samples": samples,
            "speaker_of": np.asarray(self._speaker_of, np.int32),
            "shard_of": np.asarray(shard_of, np.int32),
            "offsets": np.asarray(offsets, np.int64),
            "sizes": np.asarray(sizes, np.int32),
        }
        for name, array in numbers.items():
            np.save(self._folder / "index" / f"{name}.npy", array, allow_pickle=False)
        for name, strings in (("ids", self._ids), ("texts", self._texts), ("speakers", list(self._speakers))):
            encoded = [string.encode("utf-8") for string in strings]
            ends = np.cumsum([len(each) for each in encoded], dtype=np.int64)
            np.save(self._folder / "index" / f"{name}_ends.npy", ends, allow_pickle=False)
            blob = np.frombuffer(b"".join(encoded), np.uint8)
            np.save(self._folder / "index" / f"{name}.npy", blob, allow_pickle=False)
        summary = SetSummary(
            name=self._name,
            utterances=len(self._ids),
            seconds=float(samples.sum()) / self._sampling_rate,
            speakers=len(self._speakers),
            sampling_rate=self._sampling_rate,
            dropped=dropped,
            dropped_seconds=dropped_seconds,
            digest=digest,
            shards=tuple(shards),
        )
        (self._folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
        return summary

    def _places(self) -> tuple[list[Shard], list[int], list[int], list[int]]:
        """Shards, and shard, offset and size in bytes of every FLAC, in the order written."""
        shards: list[Shard] = []
        places: list[tuple[int, int, int]] = []
        for name in self._audio.output_paths:
            path = Path(name)
            with tarfile.open(path, "r:") as tar:
                places += [
                    (len(shards), member.offset_data, member.size)
                    for member in tar
                    if not member.name.endswith(".json")
                ]
            shards.append(Shard(path.name, path.stat().st_size))
        return shards, [p[0] for p in places], [p[1] for p in places], [p[2] for p in places]
