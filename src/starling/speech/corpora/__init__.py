"""Corpus importers, one per file. The `kind` in a corpus's settings selects its importer."""

from typing import Annotated, Any, TypeGuard, get_args

from pydantic import Field, SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator

from starling.configuration import Config
from starling.errors import ConfigError
from starling.registry import Registry
from starling.speech.corpora.coqui import CoquiCorpus
from starling.speech.corpora.cuts import LhotseCorpus
from starling.speech.corpora.jsonl import NemoCorpus, WenetCorpus
from starling.speech.corpora.kaldi import KaldiCorpus
from starling.speech.corpora.lhotse_recipe import LhotseRecipeCorpus, recipe_names
from starling.speech.corpora.several import SeveralCorpus
from starling.speech.corpora.synthetic import SyntheticCorpus
from starling.speech.corpora.tsv import TsvCorpus
from starling.speech.corpora.utterance import Audio, FileCorpus, NamedSets, Utterance

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
]

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
    """Validate with another package's class if `kind` is an entry point of `starling.corpora` or `module:name`."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    if not isinstance(kind, str) or not _REGISTRY.is_outside(kind):
        return handler(value)
    try:
        return _REGISTRY.find(kind).model_validate(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


CorpusConfig = Annotated[_BuiltIn, Field(discriminator="kind"), WrapValidator(_validate_corpus), SerializeAsAny()]
"""The settings of a corpus, of the class that its `kind` selects."""

SeveralCorpus.model_rebuild(_types_namespace={"CorpusConfig": CorpusConfig})
