"""A prepared set on disk: lhotse Shar shards, and an index beside them for random access.

<folder>/summary.json                     what is inside; written last
<folder>/dropped.tsv                      what was left out, and why
<folder>/shar/cuts.000000.jsonl.gz        readable by `lhotse.CutSet.from_shar(in_dir=<folder>/shar)`
<folder>/shar/recording.000000.tar        FLAC
<folder>/index/*.npy                      ids, texts, speakers, durations, place of every FLAC in its shard
"""

import io
import json
import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from starling.errors import DataError

FORMAT = 1
MAX_OPEN_SHARDS = 64
_NUMBERS = ("durations", "num_samples", "speaker_of", "shard_of", "offsets", "sizes")
_TEXTS = ("ids", "texts", "speakers")


@dataclass(frozen=True)
class Shard:
    """One tar of FLAC files and the size it must have."""

    file: str
    num_bytes: int


@dataclass(frozen=True)
class SetSummary:
    """What one prepared set holds. `dropped` counts utterances, `dropped_seconds` their audio where known."""

    name: str
    utterances: int
    seconds: float
    speakers: int
    sampling_rate: int
    dropped: int
    dropped_seconds: float
    digest: str
    shards: tuple[Shard, ...]
    format: int = FORMAT

    @property
    def hours(self) -> float:
        return self.seconds / 3600


def read_summary(folder: Path) -> SetSummary:
    """The summary of a prepared set.

    Raises:
        DataError: the folder is missing, incomplete, or was written by another version.
    """
    path = folder / "summary.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise DataError(
                f"{folder}: prepared data of format {fields['format']}, this version reads format {FORMAT}; "
                f"remove the folder and run `starling prepare` again"
            )
        fields["shards"] = tuple(Shard(**shard) for shard in fields["shards"])
        return SetSummary(**fields)
    except FileNotFoundError:
        raise DataError(
            f"{folder}: no prepared data here ({path.name} is missing); run `starling prepare RECIPE` first"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); remove {folder} and run `starling prepare RECIPE` again"
        ) from error


class _Strings:
    """N strings in one block of UTF-8 bytes; 8 bytes of overhead each."""

    def __init__(self, blob: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self._blob, self._ends = blob, ends

    def __getitem__(self, i: int) -> str:
        start = int(self._ends[i - 1]) if i else 0
        return self._blob[start : int(self._ends[i])].tobytes().decode("utf-8")

    def __len__(self) -> int:
        return len(self._ends)


class SpeechSet:
    """One prepared set, opened for random access; picklable, safe after a fork, not for several threads at once.

    Everything but the audio stays in memory-mapped arrays, so that opening a million utterances takes
    milliseconds and processes share the pages.
    """

    name: str
    sampling_rate: int
    """Hz"""
    durations: NDArray[np.float32]
    """[N], seconds"""
    num_samples: NDArray[np.int64]
    """[N], samples"""

    def __init__(self, folder: Path, summary: SetSummary, arrays: dict[str, NDArray[Any]]) -> None:
        self.folder, self.summary = folder, summary
        self.name, self.sampling_rate = summary.name, summary.sampling_rate
        self.durations, self.num_samples = arrays["durations"], arrays["num_samples"]
        self._speaker_of, self._shard_of = arrays["speaker_of"], arrays["shard_of"]
        self._offsets, self._sizes = arrays["offsets"], arrays["sizes"]
        self._ids, self._texts, self._speakers = (_Strings(arrays[name], arrays[f"{name}_ends"]) for name in _TEXTS)
        self._files: OrderedDict[int, int] = OrderedDict()

    @classmethod
    def open(cls, folder: Path) -> "SpeechSet":
        """Open the set that `starling prepare` wrote in `folder`.

        Raises:
            DataError: the folder is missing or incomplete, or a shard has not the size it was written with.
        """
        folder = Path(folder)
        summary = read_summary(folder)
        for shard in summary.shards:
            path = folder / "shar" / shard.file
            size = path.stat().st_size if path.is_file() else None
            if size != shard.num_bytes:
                state = "is missing" if size is None else f"has {size} bytes, not {shard.num_bytes}"
                raise DataError(f"{path}: {state}; remove {folder} and run `starling prepare RECIPE` again")
        names = [*_NUMBERS, *_TEXTS, *(f"{name}_ends" for name in _TEXTS)]
        arrays = {name: _load_array(folder, name) for name in names}
        for name in (*_NUMBERS, "ids_ends", "texts_ends"):
            if len(arrays[name]) != summary.utterances:
                raise DataError(
                    f"{folder}/index/{name}.npy: {len(arrays[name])} entries for {summary.utterances} utterances; "
                    f"remove {folder} and run `starling prepare RECIPE` again"
                )
        return cls(folder, summary, arrays)

    def __len__(self) -> int:
        return self.summary.utterances

    def id(self, index: int) -> str:
        return self._ids[self._checked(index)]

    def text(self, index: int) -> str:
        return self._texts[self._checked(index)]

    def speaker(self, index: int) -> str:
        return self._speakers[int(self._speaker_of[self._checked(index)])]

    def audio(self, index: int) -> NDArray[np.float32]:
        """Samples of utterance `index`, [T], mono, in -1..1.

        Raises:
            DataError: the stored bytes are no longer the FLAC that was written.
        """
        index = self._checked(index)
        encoded = os.pread(self._file(int(self._shard_of[index])), int(self._sizes[index]), int(self._offsets[index]))
        try:
            samples, rate = soundfile.read(io.BytesIO(encoded), dtype="float32")
        except soundfile.LibsndfileError as error:
            raise self._damaged(index, str(error)) from error
        if samples.shape != (int(self.num_samples[index]),) or rate != self.sampling_rate:
            raise self._damaged(
                index, f"{samples.shape} samples at {rate} Hz, not {self.num_samples[index]} at {self.sampling_rate} Hz"
            )
        result: NDArray[np.float32] = samples
        return result

    def _damaged(self, index: int, reason: str) -> DataError:
        file = self.summary.shards[int(self._shard_of[index])].file
        return DataError(
            f"{self.folder}/shar/{file}: the audio of {self.id(index)} is damaged ({reason}); "
            f"remove {self.folder} and run `starling prepare RECIPE` again"
        )

    def _checked(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"utterance {index} of {self.name}, which has {len(self)}")
        return int(index)

    def _file(self, shard: int) -> int:
        """Descriptor of an open shard. `os.pread` shares no position, so forked processes may share it."""
        descriptor = self._files.get(shard)
        if descriptor is None:
            path = self.folder / "shar" / self.summary.shards[shard].file
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise DataError(f"{path}: cannot be opened: {error.strerror}") from error
            self._files[shard] = descriptor
            if len(self._files) > MAX_OPEN_SHARDS:
                os.close(self._files.popitem(last=False)[1])
        else:
            self._files.move_to_end(shard)
        return descriptor

    def close(self) -> None:
        """Close the open shards; they are opened again when needed."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        if hasattr(self, "_files"):
            self.close()

    def __reduce__(self) -> "tuple[object, tuple[Path]]":
        return (SpeechSet.open, (self.folder.absolute(),))


def _load_array(folder: Path, name: str) -> NDArray[Any]:
    path = folder / "index" / f"{name}.npy"
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); remove {folder} and run `starling prepare RECIPE` again"
        ) from error
