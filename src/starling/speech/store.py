"""A prepared set on disk: lhotse Shar shards, and an index beside them for random access.

<folder>/summary.json                     what is inside; written last
<folder>/dropped.tsv                      what was left out, and why
<folder>/shar/cuts.000000.jsonl.gz        readable by `lhotse.CutSet.from_shar(in_dir=<folder>/shar)`
<folder>/shar/recording.000000.tar        FLAC
<folder>/index/*.npy                      ids, texts, speakers, durations, place of every FLAC in its shard
<folder>/remote.json                      in place of shar/, when the shards are in an object store
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from starling.errors import DataError
from starling.speech.shards import Place, Shard, Shards, open_shards

FORMAT = 1
_NUMBERS = ("durations", "num_samples", "speaker_of", "shard_of", "offsets", "sizes")
_TEXTS = ("ids", "texts", "speakers")
_ARRAYS = (*_NUMBERS, *_TEXTS, *(f"{name}_ends" for name in _TEXTS))
INDEX_FILES = tuple(f"{name}.npy" for name in _ARRAYS)
"""In the folder `index` of every prepared set."""


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


def parse_summary(text: str, folder: str) -> SetSummary:
    """The summary of the prepared set in `folder`, from its text; DataError for another format."""
    fields = json.loads(text)
    if fields["format"] != FORMAT:
        raise DataError(
            f"{folder}: prepared data of format {fields['format']}, this version reads format {FORMAT}; "
            f"remove the folder and run `starling prepare` again"
        )
    fields["shards"] = tuple(Shard(**shard) for shard in fields["shards"])
    return SetSummary(**fields)


def read_summary(folder: Path) -> SetSummary:
    """The summary of a prepared set.

    Raises:
        DataError: the folder is missing, incomplete, or was written by another version.
    """
    path = folder / "summary.json"
    try:
        return parse_summary(path.read_text(encoding="utf-8"), str(folder))
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

    def __init__(self, folder: Path, summary: SetSummary, arrays: dict[str, NDArray[Any]], shards: Shards) -> None:
        self.folder, self.summary = folder, summary
        self.name, self.sampling_rate = summary.name, summary.sampling_rate
        self.durations, self.num_samples = arrays["durations"], arrays["num_samples"]
        self._speaker_of, self._shard_of = arrays["speaker_of"], arrays["shard_of"]
        self._offsets, self._sizes = arrays["offsets"], arrays["sizes"]
        self._ids, self._texts, self._speakers = (_Strings(arrays[name], arrays[f"{name}_ends"]) for name in _TEXTS)
        self._shards = shards

    @classmethod
    def open(cls, folder: Path) -> "SpeechSet":
        """Open the set that `starling prepare` wrote in `folder`; its shards may be in an object store.

        Raises:
            DataError: the folder is missing or incomplete, or a shard has not the size it was written with.
        """
        folder = Path(folder)
        summary = read_summary(folder)
        shards = open_shards(folder, summary.shards)
        shards.check()
        arrays = {name: _load_array(folder, name) for name in _ARRAYS}
        for name in (*_NUMBERS, "ids_ends", "texts_ends"):
            if len(arrays[name]) != summary.utterances:
                raise DataError(
                    f"{folder}/index/{name}.npy: {len(arrays[name])} entries for {summary.utterances} utterances; "
                    f"remove {folder} and run `starling prepare RECIPE` again"
                )
        return cls(folder, summary, arrays, shards)

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
        (samples,) = self.audios([index])
        if isinstance(samples, DataError):
            raise samples
        return samples

    def audios(self, indices: Sequence[int]) -> list[NDArray[np.float32] | DataError]:
        """Samples of several utterances, as `audio`; in the place of one that is damaged, the error that says so.

        From an object store all are fetched at once. Raises DataError when a shard as a whole cannot be read.
        """
        checked = [self._checked(index) for index in indices]
        encoded = self._shards.read([self._place(index) for index in checked])
        return [self._decoded(index, each) for index, each in zip(checked, encoded, strict=True)]

    def _place(self, index: int) -> Place:
        return Place(int(self._shard_of[index]), int(self._offsets[index]), int(self._sizes[index]))

    def _decoded(self, index: int, encoded: bytes) -> NDArray[np.float32] | DataError:
        size = int(self._sizes[index])
        if len(encoded) != size:
            return self._damaged(index, f"{len(encoded)} bytes are left of {size}")
        try:
            samples, rate = soundfile.read(io.BytesIO(encoded), dtype="float32")
        except (soundfile.LibsndfileError, RuntimeError, ValueError, MemoryError) as error:
            return self._damaged(index, str(error))
        if samples.shape != (int(self.num_samples[index]),) or rate != self.sampling_rate:
            return self._damaged(
                index, f"{samples.shape} samples at {rate} Hz, not {self.num_samples[index]} at {self.sampling_rate} Hz"
            )
        result: NDArray[np.float32] = samples
        return result

    def _damaged(self, index: int, reason: str) -> DataError:
        where = self._shards.where(int(self._shard_of[index]))
        return DataError(f"{where}: the audio of {self.id(index)} is damaged ({reason}); {self._shards.remedy()}")

    def _checked(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"utterance {index} of {self.name}, which has {len(self)}")
        return int(index)

    def close(self) -> None:
        """Close the open shards; they are opened again when needed."""
        self._shards.close()

    def __del__(self) -> None:
        if hasattr(self, "_shards"):
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
