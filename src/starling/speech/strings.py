"""Joins several short recordings of a speaker into one utterance, called a string."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from starling.configuration import Config
from starling.speech.audio import Audio
from starling.speech.corpora.utterance import Utterance


class StringsConfig(Config):
    """The joining of recordings, for example isolated digits into connected digits."""

    shortest: int = Field(default=3, ge=1)
    """Minimum number of recordings in a string. A speaker's only string, or the last but one, may have fewer."""
    longest: int = Field(default=7, ge=1)
    """Maximum number of recordings in a string."""
    gap_seconds: tuple[float, float] = (0.05, 0.25)
    """Minimum and maximum pause between two recordings, drawn uniformly."""
    gap_level_db: float = Field(default=-60.0, le=0)
    """Root mean square of the noise in the pauses, in dB relative to full scale."""
    copies: int | dict[str, int] = 1
    """Number of times each recording is used: one number for all sets, or one for each set (1 for sets that are not
    named)."""
    seed: int = Field(default=0, ge=0)
    """The seed of lengths, order and pauses."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.longest < self.shortest:
            raise ValueError(f"longest ({self.longest}) is less than shortest ({self.shortest})")
        low, high = self.gap_seconds
        if not 0 <= low <= high <= 10:
            raise ValueError(f"gap_seconds {low}, {high}: needs 0 <= first <= second <= 10")
        for copies in self.copies.values() if isinstance(self.copies, dict) else (self.copies,):
            if not 1 <= copies <= 1000:
                raise ValueError(f"copies {copies}: needs 1 to 1000")
        return self

    def copies_of(self, set_name: str) -> int:
        return self.copies.get(set_name, 1) if isinstance(self.copies, dict) else self.copies


@dataclass(frozen=True)
class StringPlan:
    """The plan of one string: its id, its speaker and the indices of its recordings in the set."""

    id: str
    speaker: str
    members: tuple[int, ...]


def plan_strings(speakers: Sequence[str], config: StringsConfig, set_name: str) -> list[StringPlan]:
    """Assign recordings to strings, in random order; `speakers` names the speaker of each recording.

    Each recording is used exactly `copies` times, and all recordings of a string have the same speaker. A pure function
    of its arguments.
    """
    random = np.random.default_rng([config.seed, *set_name.encode()])
    recordings: dict[str, list[int]] = {}
    for i, speaker in enumerate(speakers):
        recordings.setdefault(speaker, []).append(i)
    plans = []
    for speaker in sorted(recordings):
        own = np.asarray(recordings[speaker])
        order = np.concatenate([random.permutation(own) for _ in range(config.copies_of(set_name))])
        start = 0
        for number, length in enumerate(_lengths(len(order), config, random)):
            members = tuple(int(i) for i in order[start : start + length])
            plans.append(StringPlan(f"{speaker}-string-{number:05d}", speaker, members))
            start += length
    return [plans[i] for i in random.permutation(len(plans))]


def _lengths(total: int, config: StringsConfig, random: np.random.Generator) -> list[int]:
    """Random lengths that sum to `total`, all from `shortest` to `longest` if that is possible.

    If it is not possible, the only length, or the last but one, is below `shortest`.
    """
    lengths = []
    while total > config.longest:
        most = min(config.longest, total - config.shortest)
        lengths.append(int(random.integers(config.shortest, most + 1)) if most >= config.shortest else most)
        total -= lengths[-1]
    return [*lengths, total] if total else lengths


def join_strings(
    recordings: Sequence[Utterance], plans: Sequence[StringPlan], config: StringsConfig, sampling_rate: int
) -> list[Utterance]:
    """Join recordings into strings, and return the strings as utterances. All recordings must have the sampling rate
    `sampling_rate`, in Hz."""
    strings = []
    for plan in plans:
        members = tuple(recordings[i] for i in plan.members)
        text = " ".join(member.text for member in members)
        origin = f"a string of {', '.join(member.id for member in members)}"
        segment = "; ".join(member.segment for member in members)
        read = partial(_read, members, plan, config, sampling_rate)
        strings.append(Utterance(plan.id, plan.speaker, text, origin, read, segment))
    return strings


def _read(members: Sequence[Utterance], plan: StringPlan, config: StringsConfig, sampling_rate: int) -> Audio:
    random = np.random.default_rng([config.seed, *plan.id.encode(), *plan.members])
    level = 10 ** (config.gap_level_db / 20)
    pieces: list[NDArray[np.float32]] = []
    for member in members:
        if pieces:
            gap = round(random.uniform(*config.gap_seconds) * sampling_rate)
            pieces.append((level * random.standard_normal(gap)).astype(np.float32))
        pieces.append(member.read()[0])
    return np.concatenate(pieces), sampling_rate


def copies_problem(config: StringsConfig, sets: Collection[str]) -> str | None:
    """A message if `copies` names a set that does not exist; otherwise None."""
    unknown = [name for name in config.copies if name not in sets] if isinstance(config.copies, dict) else []
    return f"strings.copies names unknown sets: {', '.join(unknown)}" if unknown else None
