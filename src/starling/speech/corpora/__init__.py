"""Importers: one a file, each with the configuration that selects it by `kind`."""

from typing import Annotated

from pydantic import Field

from starling.speech.corpora.coqui import CoquiCorpus
from starling.speech.corpora.cuts import LhotseCorpus, LhotseRecipeCorpus, recipe_names
from starling.speech.corpora.jsonl import NemoCorpus, WenetCorpus
from starling.speech.corpora.kaldi import KaldiCorpus
from starling.speech.corpora.synthetic import SyntheticCorpus
from starling.speech.corpora.tsv import TsvCorpus
from starling.speech.corpora.utterance import Audio, Utterance

CorpusConfig = Annotated[
    TsvCorpus
    | KaldiCorpus
    | NemoCorpus
    | WenetCorpus
    | CoquiCorpus
    | LhotseCorpus
    | LhotseRecipeCorpus
    | SyntheticCorpus,
    Field(discriminator="kind"),
]

__all__ = [
    "Audio",
    "CoquiCorpus",
    "CorpusConfig",
    "KaldiCorpus",
    "LhotseCorpus",
    "LhotseRecipeCorpus",
    "NemoCorpus",
    "SyntheticCorpus",
    "TsvCorpus",
    "Utterance",
    "WenetCorpus",
    "recipe_names",
]
