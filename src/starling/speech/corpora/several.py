"""Several corpora as one, for training on a mixture of them and scoring each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from starling.configuration import Config
from starling.errors import DataError
from starling.speech.corpora.utterance import Utterance

if TYPE_CHECKING:
    from starling.speech.corpora import CorpusConfig

CorpusName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._]*$", max_length=100)]


class SeveralCorpus(Config):
    """Corpora of any kinds, by name; the set `dev` of the corpus `talks` is the set `talks-dev`.

    A set depends on its own corpus only; when another is added or changed, it need not be prepared again.
    """

    kind: Literal["several"]
    corpora: dict[CorpusName, CorpusConfig] = Field(min_length=1)
    """Name of a corpus, without a hyphen -> its settings, as in `data.corpus`."""

    @model_validator(mode="after")
    def _one_level(self) -> Self:
        nested = [name for name, corpus in self.corpora.items() if isinstance(corpus, SeveralCorpus)]
        if nested:
            raise ValueError(f"corpora.{nested[0]}: kind: several cannot hold another kind: several; list its corpora")
        return self

    @property
    def sets(self) -> Mapping[str, Any]:
        """Name of a set -> what its corpus says about it."""
        return {f"{name}-{own}": it for name, corpus in self.corpora.items() for own, it in corpus.sets.items()}

    def member(self, set_name: str) -> tuple[str, CorpusConfig, str]:
        """The corpus of a set, with its name, and the set's name in it."""
        name, _, own = set_name.partition("-")
        return name, self.corpora[name], own

    def maker(self, set_name: str) -> str:
        _, corpus, own = self.member(set_name)
        return corpus.maker(own)

    def utterances(self, set_name: str) -> Iterator[Utterance]:
        """The utterances of a set. Raises DataError, naming the corpus, if it is missing or invalid."""
        name, corpus, own = self.member(set_name)
        try:
            yield from corpus.utterances(own)
        except DataError as error:
            raise DataError(f"data.corpus.corpora.{name}: {error}") from error
