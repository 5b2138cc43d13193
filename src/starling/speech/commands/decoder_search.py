"""What `starling evaluate` makes of a model with a decoder beside CTC, apart from the decoder's greedy texts.

exp/<name>/decode/ctc/         greedy texts of CTC
exp/<name>/decode/decoder/     texts of the decoder's beam search
exp/<name>/decode/rescored/    of the beam search over CTC, the text that an attention decoder finds best, too
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from starling.reporting.progress import Bars
from starling.speech.commands.beam_search import MOST_TUNED, BestSearch
from starling.speech.decoding.beam import Hypothesis
from starling.speech.decoding.config import DecodingConfig
from starling.speech.decoding.greedy import greedy_decode
from starling.speech.models.attention import AttentionDecoder
from starling.speech.recipe import Recipe
from starling.speech.recogniser import Heard, Recogniser
from starling.speech.scoring.score import count_errors
from starling.speech.store import SpeechSet

WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
USUAL = 1.0
"""The weight where there is nothing to tune on."""


@dataclass(frozen=True)
class Rescoring:
    """The weight of an attention decoder's log probability beside a search's score, and how it was found."""

    weight: float
    how: str


class DecoderSearch:
    """Decodes utterances in all ways that a decoder offers, and collects the texts."""

    def __init__(
        self, recogniser: Recogniser, config: DecodingConfig, search: BestSearch | None, rescoring: Rescoring | None
    ) -> None:
        self._recogniser = recogniser
        self._beam = config.decoder_beam
        self._search = search
        self._rescoring = rescoring
        kind = "attention" if isinstance(recogniser.decoder, AttentionDecoder) else "transducer"
        self.titles = {"ctc": "greedy CTC", "decoder": f"beam search of the {kind} decoder, beam {self._beam}"}
        """A description of each way of decoding, by its folder in `decode/`."""
        if rescoring is not None:
            self.titles["rescored"] = (
                f"N-best of the beam search, rescored by attention with weight {rescoring.weight:g}; {rescoring.how}"
            )
        self.texts: dict[str, dict[str, str]] = {}
        """The text of each utterance, by way of decoding."""
        self.clear()

    def clear(self) -> None:
        """Begin another set."""
        self.texts = {way: {} for way in self.titles}

    def take(self, names: Sequence[str], heard: Heard) -> None:
        """Decode a batch, which the search over CTC has taken before."""
        tokenizer = self._recogniser.tokenizer
        self.texts["ctc"].update(zip(names, greedy_decode(heard.log_probs, heard.lengths, tokenizer), strict=True))
        self.texts["decoder"].update(zip(names, self._recogniser.searched(heard, self._beam), strict=True))
        if self._search is not None and self._rescoring is not None:
            lists = [self._search.found[name] for name in names]
            scores = self._recogniser.attention_scores(heard, [[each.text for each in found] for found in lists])
            for name, found, own in zip(names, lists, scores, strict=True):
                self.texts["rescored"][name] = chosen(found, own, self._rescoring.weight)


def chosen(hypotheses: Sequence[Hypothesis], scores: Sequence[float], weight: float) -> str:
    """The text with the largest sum of the search's score and `weight` times the attention decoder's; empty if there is
    no hypothesis."""
    totals = [each.score + weight * score for each, score in zip(hypotheses, scores, strict=True)]
    return hypotheses[totals.index(max(totals))].text if totals else ""


def decoder_search(recipe: Recipe, recogniser: Recogniser, search: BestSearch | None, bars: Bars) -> DecoderSearch:
    """The ways of decoding of a recogniser with a decoder. An attention decoder's weight is tuned on the validation set
    unless the recipe has it: the least weight with the fewest word errors, then character errors."""
    config = recipe.decoding or DecodingConfig()
    rescoring = None
    if search is not None and isinstance(recogniser.decoder, AttentionDecoder):
        rescoring = _rescoring(recipe, config, recogniser, search, bars)
    return DecoderSearch(recogniser, config, search, rescoring)


def _rescoring(
    recipe: Recipe, config: DecodingConfig, recogniser: Recogniser, search: BestSearch, bars: Bars
) -> Rescoring:
    if config.attention_weight is not None:
        return Rescoring(config.attention_weight, "given")
    if (name := recipe.data.valid) is None:
        return Rescoring(USUAL, "not tuned")
    speech_set = SpeechSet.open(recipe.data.set_folder(name))
    among = np.linspace(0, len(speech_set) - 1, min(len(speech_set), MOST_TUNED)).round().astype(int).tolist()
    texts: dict[float, dict[str, str]] = {weight: {} for weight in WEIGHTS}
    for names, heard in recogniser.heard(speech_set, 120.0, partial(bars, f"rescoring {name}"), among):
        search.take(names, heard.log_probs, heard.lengths)
        lists = [search.found[each] for each in names]
        scores = recogniser.attention_scores(heard, [[each.text for each in found] for found in lists])
        for weight, found in texts.items():
            found.update(
                (utterance, chosen(hypotheses, own, weight))
                for utterance, hypotheses, own in zip(names, lists, scores, strict=True)
            )
    references = {speech_set.id(index): speech_set.text(index) for index in among}

    def errors(weight: float) -> tuple[int, int, float]:
        words, characters = count_errors(references, texts[weight])
        return words.errors, characters.errors, weight

    return Rescoring(min(WEIGHTS, key=errors), f"tuned on {len(among)} utterances of {name}")
