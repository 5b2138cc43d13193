"""Finds the best beam search for an experiment, and tunes its language models and weights on the validation set.

exp/<name>/decode/beam/words.arpa, tokens.arpa    n-grams of the training texts
exp/<name>/decode/beam/search.json                the tuned weights, and all weights that were tried
exp/<name>/decode/beam/recogs-<set>.txt, …        the same files as in decode/, for the beam search
exp/<name>/decode/beam/nbest-<set>.jsonl          the best texts of each utterance, with scores and word times
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

from starling.checkpoint.files import write_json
from starling.configuration import Config, digest
from starling.errors import ConfigError, DataError
from starling.experiment.folder import ExperimentFolder
from starling.reporting.progress import Bars
from starling.speech.corpora.lines import replace_file
from starling.speech.data import set_digest
from starling.speech.decoding import DecodingConfig, Vocabulary
from starling.speech.decoding.beam import BeamSearch, Hypothesis, SearchPool, Weights
from starling.speech.decoding.ngram import NgramModel, estimate
from starling.speech.hybrid.tying import read_words, words_of
from starling.speech.recipe import Recipe
from starling.speech.recogniser import Heard, Recogniser
from starling.speech.scoring import count_errors, references_of
from starling.speech.store import Member, SpeechSets
from starling.speech.tokens import Tokenizer
from starling.speech.training.plan import open_training_set

LM_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
WORD_PENALTIES = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
BEAMS = (8, 16, 32, 64, 128)
USUAL = Weights(lm_weight=0.5, word_penalty=0.0, beam=64)
"""Weights to use if there is no set to tune on. This `beam` is also used while the other weights are tuned."""
MOST_TUNED = 500
"""Maximum number of utterances to tune on, spread evenly over the validation set."""
RARE = 0.01
"""Probability of an unknown word above which an open vocabulary is used if there is no set to tune on."""
_ORDERS: dict[Vocabulary, int] = {"closed": 3, "open": 6}
LANGUAGE_FILES: dict[Vocabulary, str] = {"closed": "words.arpa", "open": "tokens.arpa"}
SEARCH = "search.json"


class Trial(Config):
    """The weights of a search, and the errors that the search made."""

    vocabulary: Vocabulary
    weights: Weights
    word_errors: int
    character_errors: int

    @property
    def errors(self) -> tuple[int, int]:
        """The numbers of word errors and character errors, by which trials are compared in this order."""
        return self.word_errors, self.character_errors


class TunedSearch(Config):
    """The contents of `search.json`."""

    format: int = 1
    of: str  # digest of the model, the data and the settings for which the weights were tuned
    vocabulary: Vocabulary
    num_words: int  # size of a closed vocabulary
    order: int
    weights: Weights
    tuned_on: str | None  # name of a set; None if the weights were not tuned
    num_utterances: int  # number of utterances of that set used for tuning
    trials: tuple[Trial, ...]

    @property
    def line(self) -> str:
        """A description of the search."""
        known, grams, penalty = "open vocabulary", "tokens", ""
        if self.vocabulary == "closed":
            known, grams = f"closed vocabulary of {self.num_words} words", "words"
            penalty = f", word penalty {self.weights.word_penalty:g}"
        tuned = f"tuned on {self.num_utterances} utterances of {self.tuned_on}" if self.tuned_on else "not tuned"
        return (
            f"beam search: {known}, {self.order}-grams of {grams} with weight {self.weights.lm_weight:g}{penalty}, "
            f"beam {self.weights.beam}; {tuned}"
        )


def tuning_sample(recipe: Recipe) -> SpeechSets | None:
    """At most `MOST_TUNED` utterances of a recipe's validation set, to tune on; None if there is no validation set."""
    if recipe.data.valid is None:
        return None
    valid = SpeechSets([Member("", recipe.data.set_folder(recipe.data.valid))])
    return valid.only(np.linspace(0, len(valid) - 1, min(len(valid), MOST_TUNED)).round().astype(int))


@dataclass(frozen=True)
class BestSearch:
    """Searches utterances with the tuned weights."""

    tuned: TunedSearch
    pool: SearchPool
    num_best: int

    def __call__(self, heard: Heard) -> list[list[Hypothesis]]:
        """The best hypotheses of each utterance of a batch."""
        return self.pool(heard.rows, self.tuned.weights, self.num_best)

    def text(self, log_probs: NDArray[np.float32]) -> str:
        """The best text of one utterance's log-probabilities `[T, V]`; empty if no word fits."""
        return first_text(*self.pool([log_probs], self.tuned.weights))


def first_text(hypotheses: Sequence[Hypothesis]) -> str:
    """The best text; empty if no word fits."""
    return hypotheses[0].text if hypotheses else ""


def write_hypotheses(path: Path, found: Mapping[str, Sequence[Hypothesis]]) -> None:
    """Write hypotheses as JSON lines: id, rank from 1, text, score, lm, and the words with times in seconds."""
    lines = [
        json.dumps({"id": name, "rank": rank, **asdict(each)}, ensure_ascii=False)
        for name, hypotheses in sorted(found.items())
        for rank, each in enumerate(hypotheses, 1)
    ]
    replace_file(path, "".join(f"{line}\n" for line in lines))


@contextmanager
def best_search(
    recipe: Recipe, folder: ExperimentFolder, recogniser: Recogniser, bars: Bars, jobs: int = 1
) -> Iterator[BestSearch]:
    """The search of an experiment. Its weights are read from `search.json` if they belong to the current model, data
    and settings; otherwise, they are tuned and written to `search.json`.

    Raises ConfigError or DataError for a language model or words that cannot be used, or for a training or validation
    set that is not prepared.
    """
    config = recipe.decoding or DecodingConfig()
    home = folder.decode / "beam"
    train = open_training_set(recipe)
    texts = [train.text(index) for index in range(len(train))]
    searches = _searches(config, texts, recogniser, home)
    of = _digest(recipe, config, recogniser, texts)
    with ExitStack() as stack:
        pools = {kind: stack.enter_context(SearchPool(search, jobs)) for kind, (search, _) in searches.items()}
        tuned = _stored(home / SEARCH, of)
        if tuned is None:
            sample, trials = tuning_sample(recipe), list[Trial]()
            if sample is None:
                vocabulary, weights = _likely(searches, texts), given(config)
            else:
                outputs: dict[str, NDArray[np.float32]] = {}
                for names, heard in recogniser.heard(sample, progress=partial(bars, f"hearing {sample.name}")):
                    outputs.update(zip(names, heard.rows, strict=True))
                best, trials = tune(pools, outputs, references_of(sample), config)
                vocabulary, weights = best.vocabulary, best.weights
            tuned = TunedSearch(
                of=of,
                vocabulary=vocabulary,
                num_words=len(searches[vocabulary][0].words or ()),
                order=searches[vocabulary][1],
                weights=weights,
                tuned_on=None if sample is None else sample.name,
                num_utterances=0 if sample is None else len(sample),
                trials=tuple(trials),
            )
            home.mkdir(parents=True, exist_ok=True)
            write_json(home / SEARCH, tuned.model_dump(mode="json"))
        yield BestSearch(tuned, pools[tuned.vocabulary], config.num_best)


def given(config: DecodingConfig) -> Weights:
    """The default weights, except those that a recipe sets."""
    return USUAL.model_copy(update=config.model_dump(include=set(Weights.model_fields), exclude_none=True))


def tune(
    pools: Mapping[Vocabulary, SearchPool],
    utterances: Mapping[str, NDArray[np.float32]],
    references: Mapping[str, str],
    config: DecodingConfig,
) -> tuple[Trial, list[Trial]]:
    """Tune the weights of the searches in `pools`, one for each vocabulary. Returns the best trial and all trials.

    For each vocabulary, one weight is varied at a time: first the language model's weight, then the word penalty, then
    the language model's weight again in finer steps. Finally, the narrowest beam that makes as few errors as any other
    is chosen. Among equally good values of a weight, the middle one is chosen. Values that the recipe sets are not
    varied.
    """
    trials: list[Trial] = []

    @cache
    def attempt(vocabulary: Vocabulary, weights: Weights) -> Trial:
        results = pools[vocabulary](list(utterances.values()), weights)
        texts = dict(zip(utterances, map(first_text, results), strict=True))
        words, characters = (each.errors for each in count_errors(references, texts))
        trials.append(Trial(vocabulary=vocabulary, weights=weights, word_errors=words, character_errors=characters))
        return trials[-1]

    def varied(start: Trial, key: str, values: Iterable[float]) -> list[Trial]:
        return [attempt(start.vocabulary, start.weights.model_copy(update={key: value})) for value in values]

    def vary(start: Trial, key: str, values: Iterable[float]) -> Trial:
        if getattr(config, key) is not None:
            return start
        return _middle_of_best([start, *varied(start, key, values)], key)

    bests = []
    for vocabulary in pools:
        best = vary(attempt(vocabulary, given(config)), "lm_weight", LM_WEIGHTS)
        if vocabulary == "closed":
            best = vary(best, "word_penalty", WORD_PENALTIES)
        bests.append(vary(best, "lm_weight", _between(best.weights.lm_weight)))
    best = min(bests, key=lambda trial: trial.errors)
    if config.beam is None:
        best = min(varied(best, "beam", BEAMS), key=lambda trial: (trial.errors, trial.weights.beam))
    return best, trials


def _between(weight: float) -> list[float]:
    """The values halfway between a weight and its neighbours."""
    lower = max((each for each in LM_WEIGHTS if each < weight), default=weight)
    upper = min((each for each in LM_WEIGHTS if each > weight), default=weight)
    return [(lower + weight) / 2, (weight + upper) / 2]


def _middle_of_best(trials: Sequence[Trial], key: str) -> Trial:
    fewest = min(trial.errors for trial in trials)
    best = {getattr(trial.weights, key): trial for trial in trials if trial.errors == fewest}
    return best[median_low(best)]


def _searches(
    config: DecodingConfig, texts: Sequence[str], recogniser: Recogniser, home: Path
) -> dict[Vocabulary, tuple[BeamSearch, int]]:
    """The search for each vocabulary that the recipe allows, with the order of its language model. Language models that
    are estimated are written to `home`."""
    found: dict[Vocabulary, tuple[BeamSearch, int]] = {}
    tokenizer, seconds = recogniser.tokenizer, recogniser.output_seconds
    is_limited = config.word_list is not None or config.lm is not None

    def estimated(vocabulary: Vocabulary, sentences: Iterable[Sequence[str]]) -> tuple[Path, NgramModel]:
        file, model = home / LANGUAGE_FILES[vocabulary], estimate(sentences, config.order or _ORDERS[vocabulary])
        model.write(file)
        return file, model

    if config.vocabulary != "open":
        if config.lm is not None:
            file, model = config.lm, NgramModel.read(config.lm)
        else:
            file, model = estimated("closed", map(str.split, texts))
        if config.word_list is not None:
            words = read_words(config.word_list)
        else:
            words = words_of(texts) if config.lm is None else model.words
        found["closed"] = BeamSearch(tokenizer, file, _spelled(words, tokenizer, config), seconds), model.order
    if config.vocabulary == "open" or (config.vocabulary is None and not is_limited):
        names = tokenizer.names
        file, model = estimated("open", ([names[token] for token in tokenizer.encode(each)] for each in texts))
        found["open"] = BeamSearch(tokenizer, file, None, seconds), model.order
    return found


def _spelled(words: Iterable[str], tokenizer: Tokenizer, config: DecodingConfig) -> list[str]:
    """The words that the tokens can spell, sorted. Raises ConfigError if there are none."""
    found, example = [], None
    for word in sorted(set(words)):
        try:
            tokenizer.encode(word, word)
            found.append(word)
        except DataError:
            example = example or word
    if not found:
        raise ConfigError(
            f"decoding: {config.word_list or config.lm} has no word that the recogniser's tokens can spell, such as "
            f"{example!r}; write its words as data.text does"
        )
    return found


def _likely(known: Collection[Vocabulary], texts: Sequence[str]) -> Vocabulary:
    """The vocabulary to use if there is no set to tune on. It is open if more than a hundredth of the words of new
    texts are likely to be unknown. The Good-Turing estimate of this fraction is the share of words in the training
    texts that occur only once."""
    if len(known) == 1:
        return next(iter(known))
    counts = Counter(word for text in texts for word in text.split())
    once = sum(count == 1 for count in counts.values())
    return "open" if once > RARE * counts.total() else "closed"


def _digest(recipe: Recipe, config: DecodingConfig, recogniser: Recogniser, texts: Sequence[str]) -> str:
    """A digest of everything on which the tuned weights depend."""
    model = sha256()
    for name, value in recogniser.model.state_dict().items():
        model.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    files = {
        str(path): sha256(path.read_bytes()).hexdigest()
        for path in (config.lm, config.word_list)
        if path is not None and path.is_file()
    }
    valid = recipe.data.valid
    return digest(
        {
            "model": model.hexdigest(),
            "config": config.model_dump(mode="json", exclude={"num_best", "decoder_beam", "attention_weight"}),
            "files": files,
            "texts": digest(list(texts)),
            "valid": None if valid is None else set_digest(recipe.data, valid),
        }
    )


def _stored(path: Path, of: str) -> TunedSearch | None:
    """The tuned search in a file; None if the file is missing or damaged, or has a digest other than `of`."""
    try:
        tuned = TunedSearch.model_validate_json(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return tuned if tuned.of == of else None
