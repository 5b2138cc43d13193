"""Several prepared sets as one."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from starling.errors import DataError
from starling.speech.store import SpeechSet


class Member(NamedTuple):
    """One set of a union: its domain and its folder."""

    domain: str
    folder: Path


class SpeechSets:
    """Concatenated prepared sets as one set: utterance n of the second set is number n + the length of the first.

    A union of a single set has the same ids as that set. Otherwise ids begin with the domain, which makes them unique:
    `talks/utt-1`, or `talks.2/utt-1` in the second set of a domain with several. Picklable and not thread-safe, like
    SpeechSet.
    """

    durations: NDArray[np.float32]
    """[N], seconds"""
    shards: NDArray[np.int32]
    """[N], ascending: the shard of each utterance, with consecutive numbers over all sets."""

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
        """Hz"""
        self.bounds = [0, *accumulate(len(each) for each in self.sets)]
        """[number of sets + 1]: the first utterance of each set, and the number of utterances."""
        self.durations = _joined([each.durations for each in self.sets], [0] * len(self.sets))
        num_shards = [len(each.summary.shards) for each in self.sets]
        self.shards = _joined([each._shard_of for each in self.sets], np.cumsum([0, *num_shards[:-1]]).tolist())
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

    def __len__(self) -> int:
        return self.bounds[-1]

    def _place(self, index: int) -> tuple[int, int]:
        """The set of an utterance, and its index in that set."""
        if not 0 <= index < len(self):
            raise IndexError(f"utterance {index} of {self.name}, which has {len(self)}")
        number = bisect_right(self.bounds, index) - 1
        return number, int(index) - self.bounds[number]

    def id(self, index: int) -> str:
        number, inner = self._place(index)
        return self._prefixes[number] + self.sets[number].id(inner)

    def text(self, index: int) -> str:
        number, inner = self._place(index)
        return self.sets[number].text(inner)

    def speaker(self, index: int) -> str:
        number, inner = self._place(index)
        return self.sets[number].speaker(inner)

    def domain(self, index: int) -> str:
        return self.members[self._place(index)[0]].domain

    def audio(self, index: int) -> NDArray[np.float32]:
        """The samples of utterance `index`, [T], mono, in -1..1. Raises DataError like `SpeechSet.audio`."""
        number, inner = self._place(index)
        return self.sets[number].audio(inner)

    def audios(self, indices: Sequence[int]) -> list[NDArray[np.float32] | DataError]:
        """The samples of several utterances, read set by set; a DataError in place of each damaged one."""
        places = [self._place(index) for index in indices]
        found: dict[int, NDArray[np.float32] | DataError] = {}
        for number in sorted({number for number, _ in places}):
            own = [position for position, place in enumerate(places) if place[0] == number]
            found.update(zip(own, self.sets[number].audios([places[each][1] for each in own]), strict=True))
        return [found[position] for position in range(len(places))]

    @property
    def domain_bounds(self) -> list[int]:
        """The first utterance of each domain, and the number of utterances: `[D + 1]`."""
        firsts = [
            self.bounds[next(number for number, member in enumerate(self.members) if member.domain == domain)]
            for domain in self.domains
        ]
        return [*firsts, len(self)]

    def domain_labels(self) -> NDArray[np.int32]:
        """The number of each utterance's domain, `[N]`."""
        return np.repeat(np.arange(len(self.domains), dtype=np.int32), np.diff(self.domain_bounds))

    def speaker_labels(self) -> NDArray[np.int32]:
        """A number for each utterance's speaker, `[N]`. The same name in the same domain is the same speaker."""
        numbers: dict[tuple[str, str], int] = {}
        labels = []
        for member, each in zip(self.members, self.sets, strict=True):
            names = [each._speakers[number] for number in range(each.summary.speakers)]
            own = [numbers.setdefault((member.domain, name), len(numbers)) for name in names]
            labels.append(np.asarray(own, np.int32)[each._speaker_of])
        return np.concatenate(labels)

    def __reduce__(self) -> "tuple[object, tuple[tuple[Member, ...]]]":
        absolute = tuple(Member(member.domain, member.folder.absolute()) for member in self.members)
        return (SpeechSets, (absolute,))


def _joined(arrays: Sequence[NDArray[Any]], firsts: Sequence[int]) -> NDArray[Any]:
    """Concatenated arrays, each with its entry of `firsts` added. A single array is returned unchanged,
    memory-mapped."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([(each + first).astype(each.dtype) for each, first in zip(arrays, firsts, strict=True)])


def _prefixes(members: Sequence[Member]) -> list[str]:
    domains = [member.domain for member in members]
    return [
        f"{domain}/" if domains.count(domain) == 1 else f"{domain}.{domains[: number + 1].count(domain)}/"
        for number, domain in enumerate(domains)
    ]
