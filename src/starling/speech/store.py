"""Reads prepared sets, which are lhotse Shar shards with an index for random access. Several sets can be read as one.

<folder>/summary.json                     summary of the set; written last
<folder>/dropped.tsv                      dropped utterances with the reasons
<folder>/shar/cuts.000000.jsonl.gz        readable by `lhotse.CutSet.from_shar(in_dir=<folder>/shar)`
<folder>/shar/recording.000000.tar        FLAC
<folder>/index/*.npy                      ids, texts, speakers, durations, location of each FLAC in its shard
<folder>/remote.json                      instead of shar/, if the shards are in an object store
"""

import io
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from starling.errors import DataError
from starling.files import sha256
from starling.speech.object_store import Range
from starling.speech.shards import (
    ARRAYS,
    NUMBERS,
    TEXTS,
    SetSummary,
    Shards,
    again,
    checked_file,
    open_shards,
    read_summary,
)


class _Strings:
    """N strings in one block of UTF-8 bytes, with an overhead of 8 bytes per string. `name` is the name of the byte
    array."""

    def __init__(self, folder: Path, name: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._folder, self._name = folder, name
        self._blob, self._ends = arrays[name], arrays[f"{name}_ends"]

    def __getitem__(self, i: int) -> str:
        """String `i`. Raises DataError if its bounds or its bytes are invalid."""
        start, end = int(self._ends[i - 1]) if i else 0, int(self._ends[i])
        try:
            if not 0 <= start <= end <= len(self._blob):
                raise ValueError(f"bytes {start} to {end} of {len(self._blob)}")
            return self._blob[start:end].tobytes().decode("utf-8")
        except ValueError as error:
            raise DataError(
                f"{self._folder}/index/{self._name}.npy: entry {i} is damaged ({error}); {again(self._folder)}"
            ) from error


class Stored(NamedTuple):
    """An utterance that was read from a set."""

    id: str
    text: str
    samples: NDArray[np.float32] | DataError
    """Mono samples `[T]` in -1..1, or an error if the stored FLAC is damaged."""


class SpeechSet:
    """A prepared set that is open for random access. A `SpeechSet` is picklable and fork-safe, but not thread-safe.

    Everything except the audio is in memory-mapped arrays, which processes share. `open` verifies the digests of the
    arrays, which takes about 0.3 s for a million utterances. Unpickling a copy in a worker does not repeat this check.
    """

    def __init__(self, folder: Path, summary: SetSummary, arrays: dict[str, NDArray[Any]], shards: Shards) -> None:
        self.folder, self.summary = folder, summary
        self.name = summary.name
        self.sampling_rate = summary.sampling_rate
        """Sampling rate in Hz."""
        self.durations: NDArray[np.float32] = arrays["durations"]
        """Duration of each utterance in seconds, `[N]`."""
        self.num_samples: NDArray[np.int64] = arrays["num_samples"]
        """Number of samples of each utterance, `[N]`."""
        self._speaker_of, self._shard_of = arrays["speaker_of"], arrays["shard_of"]
        self._offsets, self._sizes = arrays["offsets"], arrays["sizes"]
        self._checks = arrays["checks"]
        self._ids, self._texts, self._speakers = (_Strings(folder, name, arrays) for name in TEXTS)
        self._shards = shards

    @classmethod
    def open(cls, folder: Path, is_checked: bool = False) -> "SpeechSet":
        """Open the set that `starling prepare` wrote to `folder`; its shards may be in an object store. `is_checked`
        means that another process has already verified the digests.

        Raises:
            DataError: The folder is missing or incomplete, a file of the index does not match its digest, or a local
                shard differs in size from when it was written.
        """
        folder = Path(folder)
        summary = read_summary(folder)
        shards = open_shards(folder, summary.shards)
        arrays = {name: _load_array(folder, summary, name, is_checked) for name in ARRAYS}
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
        """The mono samples `[T]`, in -1..1, of utterance `index`. Raises DataError if the stored FLAC is damaged."""
        (utterance,) = self.read([index])
        if isinstance(utterance.samples, DataError):
            raise utterance.samples
        return utterance.samples

    def read(self, indices: Sequence[int]) -> list[Stored]:
        """Read several utterances. From an object store, they are requested concurrently. Raises DataError if a shard
        cannot be read."""
        checked = [self._checked(index) for index in indices]
        encoded = self._shards.read([self._range(index) for index in checked])
        return [
            Stored(self.id(index), self.text(index), self._decoded(index, each))
            for index, each in zip(checked, encoded, strict=True)
        ]

    def _range(self, index: int) -> Range:
        """The location of the audio. If the index points beyond the end of the shard, the location is the shard's first
        byte."""
        shard = self.summary.shards[int(self._shard_of[index])]
        offset, size = int(self._offsets[index]), int(self._sizes[index])
        is_there = size > 0 and offset + size <= shard.num_bytes
        return Range(shard.file, offset, size) if is_there else Range(shard.file, 0, 1)

    def _decoded(self, index: int, encoded: bytes) -> NDArray[np.float32] | DataError:
        import soundfile

        size, expected = int(self._sizes[index]), int(self.num_samples[index])
        if len(encoded) != size:
            return self._damaged(index, f"only {len(encoded)} of {size} bytes")
        if crc32(encoded) != int(self._checks[index]):
            return self._damaged(index, "its CRC-32 is wrong")
        try:
            with soundfile.SoundFile(io.BytesIO(encoded)) as file:
                if (file.frames, file.channels, file.samplerate) != (expected, 1, self.sampling_rate):
                    return self._damaged(
                        index,
                        f"{file.frames} samples, {file.channels} channels at {file.samplerate} Hz, not {expected} at "
                        f"{self.sampling_rate} Hz",
                    )
                samples = np.asarray(file.read(expected, dtype="float32"))
        except (soundfile.LibsndfileError, RuntimeError, ValueError, MemoryError) as error:
            return self._damaged(index, str(error))
        if len(samples) != expected:
            return self._damaged(index, f"only {len(samples)} of {expected} samples")
        return samples

    def _damaged(self, index: int, reason: str) -> DataError:
        where = f"{self._shards.root}/{self._range(index).file}"
        return DataError(f"{where}: the audio of {self.id(index)} is damaged ({reason}); {self._shards.remedy}")

    def _checked(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"utterance {index} of {self.name}, which has {len(self)}")
        return int(index)

    def close(self) -> None:
        """Close the open shards. They are reopened when needed."""
        self._shards.close()

    def __del__(self) -> None:
        if hasattr(self, "_shards"):
            self.close()

    def __reduce__(self) -> "tuple[object, tuple[Path, bool]]":
        return (SpeechSet.open, (self.folder.absolute(), True))


class Member(NamedTuple):
    """A set of a `SpeechSets`, given by its domain and its folder."""

    domain: str
    folder: Path


class SpeechSets:
    """All or some utterances of one or several prepared sets, combined as one set.

    Utterances are numbered consecutively in the order of the sets. The ids of a single set are unchanged. The ids of
    several sets are prefixed with the domain to make them unique: `talks/utt-1`, or `talks.2/utt-1` in the second set
    of a domain. Like a `SpeechSet`, the set is picklable but not thread-safe.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        """Open the sets, which must be ordered by domain.

        Raises DataError if a set cannot be opened or occurs twice, or if the sets differ in sampling rate.
        """
        self.members = tuple(members)
        self.sets = [SpeechSet.open(member.folder) for member in members]
        self._check()
        self.domains = tuple(dict.fromkeys(member.domain for member in members))
        self.name = " + ".join(dict.fromkeys(each.name for each in self.sets))
        self.sampling_rate = self.sets[0].sampling_rate
        """Sampling rate in Hz."""
        self._bounds = [0, *accumulate(len(each) for each in self.sets)]
        self.numbers: NDArray[np.int32] = np.arange(self._bounds[-1], dtype=np.int32)
        """The number of each utterance among all utterances of the sets, `[N]`, ascending."""
        self.durations: NDArray[np.float32] = _joined([each.durations for each in self.sets], [0] * len(self.sets))
        """Duration of each utterance in seconds, [N]."""
        num_shards = [len(each.summary.shards) for each in self.sets]
        firsts = np.cumsum([0, *num_shards[:-1]]).tolist()
        self.shards: NDArray[np.int32] = _joined([each._shard_of for each in self.sets], firsts)
        """The shard of each utterance, `[N]`, ascending. Shards are numbered consecutively over all sets."""
        self._prefixes = _prefixes(members) if len(members) > 1 else [""]

    def _check(self) -> None:
        rates = {each.sampling_rate: member.folder for each, member in zip(self.sets, self.members, strict=True)}
        if len(rates) > 1:
            found = ", ".join(f"{folder} at {rate} Hz" for rate, folder in sorted(rates.items()))
            raise DataError(f"sets with different sampling rates cannot be mixed: {found}; prepare them at one rate")
        places: dict[Path, Path] = {}
        for member in self.members:
            if (place := member.folder.resolve()) in places:
                raise DataError(f"{member.folder} is in the mixture twice, also as {places[place]}; remove one of them")
            places[place] = member.folder

    def only(self, indices: NDArray[np.integer]) -> "SpeechSets":
        """The utterances `indices` (`[n]`, ascending) of this set, as a separate set that shares the open files. If
        `indices` selects all utterances, nothing is copied."""
        if np.array_equal(indices, np.arange(len(self))):
            return self
        chosen = copy(self)
        columns = (self.numbers, self.durations, self.shards)
        chosen.numbers, chosen.durations, chosen.shards = (each[indices] for each in columns)
        return chosen

    def __len__(self) -> int:
        return len(self.numbers)

    def _place(self, index: int) -> tuple[int, int]:
        """The set of an utterance, and its index in that set."""
        if not 0 <= index < len(self):
            raise IndexError(f"utterance {index} of {self.name}, which has {len(self)}")
        number = int(self.numbers[index])
        place = bisect_right(self._bounds, number) - 1
        return place, number - self._bounds[place]

    def id(self, index: int) -> str:
        place, inner = self._place(index)
        return self._prefixes[place] + self.sets[place].id(inner)

    def text(self, index: int) -> str:
        place, inner = self._place(index)
        return self.sets[place].text(inner)

    def read(self, indices: Sequence[int]) -> list[Stored]:
        """Read several utterances, set by set, as `SpeechSet.read` does."""
        places = [self._place(index) for index in indices]
        found: dict[int, Stored] = {}
        for number in sorted({number for number, _ in places}):
            own = [position for position, place in enumerate(places) if place[0] == number]
            for position, each in zip(own, self.sets[number].read([places[each][1] for each in own]), strict=True):
                found[position] = each._replace(id=self._prefixes[number] + each.id)
        return [found[position] for position in range(len(places))]

    def labels(self, of: Literal["speaker", "domain"]) -> NDArray[np.int32]:
        """The number of each utterance's speaker or domain, `[N]`. Domains are numbered in order. Equal names in the
        same domain denote the same speaker."""
        known: dict[tuple[str, str], int] = {}
        labels = []
        for member, each in zip(self.members, self.sets, strict=True):
            names, which = [""], np.zeros_like(each._speaker_of)
            if of == "speaker":
                names, which = [each._speakers[number] for number in range(each.summary.speakers)], each._speaker_of
            own = [known.setdefault((member.domain, name), len(known)) for name in names]
            labels.append(np.asarray(own, np.int32)[which])
        return np.concatenate(labels)[self.numbers]

    @property
    def domain_bounds(self) -> list[int]:
        """The first utterance of each domain, followed by the number of utterances: `[D + 1]`."""
        bounds: list[int] = np.searchsorted(self.labels("domain"), np.arange(len(self.domains) + 1)).tolist()
        return bounds

    def __reduce__(self) -> "tuple[object, tuple[tuple[Member, ...], NDArray[np.int32]]]":
        absolute = tuple(Member(member.domain, member.folder.absolute()) for member in self.members)
        return _reopened, (absolute, self.numbers)


def _reopened(members: Sequence[Member], numbers: NDArray[np.int32]) -> SpeechSets:
    return SpeechSets(members).only(numbers)


def _load_array(folder: Path, summary: SetSummary, name: str, is_checked: bool) -> NDArray[Any]:
    """Load an array of the index, memory-mapped. Raises DataError unless it matches the summary."""
    highest = {"speaker_of": summary.speakers - 1, "shard_of": len(summary.shards) - 1}.get(name, 1 << 61)
    kind, num_entries = (
        ("speakers", summary.speakers) if name == "speakers_ends" else ("utterances", summary.utterances)
    )
    try:
        path = checked_file(folder, f"index/{name}.npy")
        if not is_checked and sha256(path) != summary.files[path.name]:
            raise ValueError("its SHA-256 is not the one in summary.json")
        array = np.lib.format.open_memmap(path, mode="r")
        if array.ndim != 1 or array.dtype != np.dtype(ARRAYS[name]):
            raise ValueError(f"has type {array.dtype} and {array.ndim} dimensions, not {ARRAYS[name]} and one")
        if name not in TEXTS and len(array) != num_entries:
            raise ValueError(f"{len(array)} entries for {num_entries} {kind}")
        if name in NUMBERS and len(array) and not (array.min() >= 0 and array.max() <= highest):
            raise ValueError(f"values from {array.min()} to {array.max()}, allowed are 0 to {highest}")
    except DataError:
        raise
    except Exception as error:  # NumPy parses the header as Python source and may raise any error
        raise DataError(f"{folder}/index/{name}.npy: cannot be read ({error}); {again(folder)}") from error
    return np.asarray(array)


def _joined(arrays: Sequence[NDArray[Any]], firsts: Sequence[int]) -> NDArray[Any]:
    """Add to each array its element of `firsts`, and concatenate the arrays. A single array is returned unchanged and
    stays memory-mapped."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([(each + first).astype(each.dtype) for each, first in zip(arrays, firsts, strict=True)])


def _prefixes(members: Sequence[Member]) -> list[str]:
    domains = [member.domain for member in members]
    return [
        f"{domain}/" if domains.count(domain) == 1 else f"{domain}.{domains[: number + 1].count(domain)}/"
        for number, domain in enumerate(domains)
    ]
