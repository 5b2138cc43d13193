"""Corpus importers. The `kind` in a corpus's settings selects its importer."""

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self, TypeGuard, get_args

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
from starling.speech.corpora.lhotse_recipe import LhotseCorpus, LhotseRecipeCorpus, recipe_names
from starling.speech.corpora.manifests import CoquiCorpus, KaldiCorpus, NemoCorpus, TsvCorpus, WenetCorpus
from starling.speech.corpora.synthetic import SyntheticCorpus
from starling.speech.corpora.utterance import FileCorpus, NamedSets, Utterance

__all__ = [
    "Audio",
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
    "recipe_names",
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
