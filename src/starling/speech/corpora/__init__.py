"""Corpus importers. The `kind` in a corpus's settings selects its importer.

Short recordings of a speaker can be joined into one utterance, called a string.
"""

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeGuard, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    Field,
    SerializeAsAny,
    StringConstraints,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from starling.configuration import Config
from starling.errors import ConfigError, DataError
from starling.registry import Registry
from starling.speech.audio import Audio
from starling.speech.corpora.lhotse_recipe import LhotseCorpus, LhotseRecipeCorpus
from starling.speech.corpora.manifests import (
    CoquiCorpus,
    FileCorpus,
    KaldiCorpus,
    NamedSets,
    NemoCorpus,
    TsvCorpus,
    Utterance,
    WenetCorpus,
)
from starling.speech.corpora.synthetic import SyntheticCorpus

__all__ = [
    "CoquiCorpus",
    "CorpusConfig",
    "FileCorpus",
    "KaldiCorpus",
    "LhotseCorpus",
    "LhotseRecipeCorpus",
    "NamedSets",
    "NemoCorpus",
    "SeveralCorpus",
    "SyntheticCorpus",
    "TsvCorpus",
    "Utterance",
    "WenetCorpus",
    "settings_of",
]

CorpusName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._]*$", max_length=100)]


class SeveralCorpus(Config):
    """Several corpora of any kind, by name; the set `dev` of the corpus `talks` is called `talks-dev`.

    A set depends only on its own corpus, so it need not be prepared again when another corpus is added or changed.
    """

    kind: Literal["several"]
    corpora: dict[CorpusName, "CorpusConfig"] = Field(min_length=1)
    """The settings of each corpus, as in `data.corpus`, by its name, which has no hyphen."""
    tags: dict[CorpusName, str] = Field(default={})
    """One character for each corpus, such as Ⓔ, by the name of the corpus. The character becomes the first word of the
    corpus's transcripts, for example so that the model learns the language. `evaluate` scores texts without it, and
    reports how often the model chose the right one."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = [
            f"corpora.{name}: kind: several cannot hold another kind: several; list its corpora"
            for name, corpus in self.corpora.items()
            if isinstance(corpus, SeveralCorpus)
        ]
        if self.tags:
            problems += [
                f"tags.{name}: missing; each corpus needs one" for name in self.corpora if name not in self.tags
            ]
            problems += [f"tags.{name}: there is no such corpus" for name in self.tags if name not in self.corpora]
            problems += [
                f"tags.{name}: {tag!r} is not a single character other than letters, digits and spaces"
                for name, tag in self.tags.items()
                if len(tag) != 1 or tag.isspace() or unicodedata.category(tag)[0] in "LNC"
            ]
            if len(set(map(str.upper, self.tags.values()))) < len(self.tags):
                problems.append("tags: two corpora have the same")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def sets(self) -> Mapping[str, Any]:
        """The entry of each set in its corpus's `sets`, by the name of the set."""
        return {f"{name}-{own}": it for name, corpus in self.corpora.items() for own, it in corpus.sets.items()}

    def member(self, set_name: str) -> "tuple[str, CorpusConfig, str]":
        """The name of a set's corpus, the corpus, and the name of the set in that corpus."""
        name, _, own = set_name.partition("-")
        return name, self.corpora[name], own

    def tag(self, set_name: str) -> str:
        """The word that is put before the transcripts of a set; empty if there is none."""
        return self.tags.get(self.member(set_name)[0], "")

    def maker(self, set_name: str) -> str:
        _, corpus, own = self.member(set_name)
        return corpus.maker(own)

    def utterances(self, set_name: str) -> Iterator[Utterance]:
        """Yield the utterances of a set. Raises DataError, naming the corpus, if the corpus is missing or invalid."""
        name, corpus, own = self.member(set_name)
        tag = self.tag(set_name)
        try:
            for each in corpus.utterances(own):
                yield replace(each, text=f"{tag} {each.text}") if tag and each.text.strip() else each
        except DataError as error:
            raise DataError(f"data.corpus.corpora.{name}: {error}") from error


_BuiltIn = (
    TsvCorpus
    | KaldiCorpus
    | NemoCorpus
    | WenetCorpus
    | CoquiCorpus
    | LhotseCorpus
    | LhotseRecipeCorpus
    | SyntheticCorpus
    | SeveralCorpus
)


def _is_corpus(found: object) -> TypeGuard[type[Config]]:
    return (
        isinstance(found, type)
        and issubclass(found, Config)
        and {"kind", "sets"} <= found.model_fields.keys()
        and all(callable(getattr(found, method, None)) for method in ("utterances", "maker"))
    )


_REGISTRY: Registry[type[Config]] = Registry(
    {get_args(each.model_fields["kind"].annotation)[0]: each for each in get_args(_BuiltIn)},
    "starling.corpora",
    accepts=_is_corpus,
    wanted="a class of settings with kind, sets, maker and utterances, such as starling.speech.corpora.KaldiCorpus",
)


def _validate_corpus(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate the settings with another package's class if `kind` is an entry point of `starling.corpora` or has the
    form `module:name`."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    if not isinstance(kind, str) or not _REGISTRY.is_outside(kind):
        return handler(value)
    try:
        return _REGISTRY.find(kind).model_validate(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


CorpusConfig = Annotated[_BuiltIn, Field(discriminator="kind"), WrapValidator(_validate_corpus), SerializeAsAny()]
"""The settings of a corpus; `kind` selects their class."""

SeveralCorpus.model_rebuild()


def settings_of(corpus: CorpusConfig, set_name: str) -> dict[str, Any]:
    """The settings of a corpus that determine one of its sets, as JSON. The corpus's method `maker` describes what else
    the set depends on."""
    if isinstance(corpus, SeveralCorpus):
        _, member, own = corpus.member(set_name)
        tag = corpus.tag(set_name)
        return settings_of(member, own) | ({"tag": tag} if tag else {})
    tree = corpus.model_dump(mode="json", exclude=getattr(corpus, "without_effect", None))
    return tree | {"sets": tree["sets"][set_name]}


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

    Each recording is used exactly `copies` times, and all recordings of a string have the same speaker. The result
    depends only on the arguments.
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
