"""The best decoding of an experiment: its language models, and a beam search with weights tuned on the validation set.

exp/<name>/decode/beam/words.arpa, tokens.arpa    n-grams of the training texts
exp/<name>/decode/beam/search.json                the tuned weights, and all that were tried
exp/<name>/decode/beam/recogs-<set>.txt, …        as in decode/, of the beam search
exp/<name>/decode/beam/nbest-<set>.jsonl          the best texts of each utterance, with scores and word times
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from starling.checkpoint.files import write_json
from starling.configuration import Config, digest
from starling.errors import ConfigError, DataError
from starling.experiment.folder import ExperimentFolder
from starling.reporting.progress import Bars
from starling.speech.data import set_digest
from starling.speech.decoding.beam import BeamSearch, Hypothesis, SearchPool, Weights
from starling.speech.decoding.config import DecodingConfig, Vocabulary
from starling.speech.decoding.ngram import NgramModel, estimate
from starling.speech.decoding.tuning import Trial, given, tune
from starling.speech.hybrid.lexicon import read_words, words_of
from starling.speech.recipe import Recipe
from starling.speech.recogniser import Recogniser
from starling.speech.store import SpeechSet
from starling.speech.tokens import Tokenizer
from starling.speech.training.plan import open_training_set

MOST_TUNED = 500
"""Utterances of the validation set to tune on, spread evenly over it."""
RARE = 0.01
"""The probability of an unknown word above which an untuned vocabulary is open."""
_ORDERS: dict[Vocabulary, int] = {"closed": 3, "open": 6}
LANGUAGE_FILES: dict[Vocabulary, str] = {"closed": "words.arpa", "open": "tokens.arpa"}
SEARCH = "search.json"


class TunedSearch(Config):
    """What `search.json` holds."""

    format: int = 1
    of: str  # digest of the model, the data and the settings
    vocabulary: Vocabulary
    num_words: int  # of a closed vocabulary
    order: int
    weights: Weights
    tuned_on: str | None  # the set; None: the weights are not tuned
    num_utterances: int  # of that set
    trials: tuple[Trial, ...]

    @property
    def line(self) -> str:
        """The search in words."""
        known = f"closed vocabulary of {self.num_words} words" if self.vocabulary == "closed" else "open vocabulary"
        grams = "words" if self.vocabulary == "closed" else "tokens"
        penalty = f", word penalty {self.weights.word_penalty:g}" if self.vocabulary == "closed" else ""
        tuned = f"tuned on {self.num_utterances} utterances of {self.tuned_on}" if self.tuned_on else "not tuned"
        return (
            f"beam search: {known}, {self.order}-grams of {grams} with weight {self.weights.lm_weight:g}{penalty}, "
            f"beam {self.weights.beam}; {tuned}"
        )


@dataclass(frozen=True)
class Language:
    """A language model on disk, and the closed vocabulary that goes with it (None: an open one)."""

    file: Path
    order: int
    words: list[str] | None


class BestSearch:
    """Searches utterances with the tuned weights, and collects the results."""

    def __init__(self, tuned: TunedSearch, pool: SearchPool, num_best: int) -> None:
        self.tuned = tuned
        self.found: dict[str, list[Hypothesis]] = {}
        self._pool = pool
        self._num_best = num_best

    def take(self, names: Sequence[str], log_probs: Tensor, frames: Tensor) -> None:
        """Search a batch of log-probabilities `[B, T, V]` with lengths `[B]`."""
        results = self._pool(_rows(log_probs, frames), self.tuned.weights, self._num_best)
        self.found.update(zip(names, results, strict=True))

    def text(self, log_probs: NDArray[np.float32]) -> str:
        """The best text of one utterance's log-probabilities `[T, V]`; empty if no word fits."""
        (found,) = self._pool([log_probs], self.tuned.weights)
        return found[0].text if found else ""

    @property
    def texts(self) -> dict[str, str]:
        """The best text of each utterance; empty if no word fits."""
        return {name: each[0].text if each else "" for name, each in self.found.items()}

    def write(self, path: Path) -> None:
        """Write all hypotheses as JSON lines: id, rank from 1, text, score, lm, and the words with times in seconds."""
        lines = [
            json.dumps({"id": name, "rank": rank, **asdict(each)}, ensure_ascii=False)
            for name, hypotheses in sorted(self.found.items())
            for rank, each in enumerate(hypotheses, 1)
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@contextmanager
def best_search(
    recipe: Recipe, folder: ExperimentFolder, recogniser: Recogniser, bars: Bars, jobs: int = 1
) -> Iterator[BestSearch]:
    """The search of an experiment, with weights from `search.json` if that is of this model, these data and settings;
    otherwise they are tuned, and written there.

    Raises ConfigError and DataError for a language model or words that cannot be used, and for a training or validation
    set that is not prepared.
    """
    config = recipe.decoding or DecodingConfig()
    home = folder.decode / "beam"
    texts = _training_texts(recipe)
    languages = _languages(config, texts, recogniser.tokenizer, home)
    of = _digest(recipe, config, recogniser, texts)
    with ExitStack() as stack:
        pools = {
            kind: stack.enter_context(
                SearchPool(BeamSearch(recogniser.tokenizer, each.file, each.words, recogniser.output_seconds), jobs)
            )
            for kind, each in languages.items()
        }
        tuned = _stored(home / SEARCH, of)
        if tuned is None:
            tuned = _tuned(recipe, config, recogniser, languages, pools, of, texts, bars)
            home.mkdir(parents=True, exist_ok=True)
            write_json(home / SEARCH, tuned.model_dump(mode="json"))
        yield BestSearch(tuned, pools[tuned.vocabulary], config.num_best)


def _tuned(
    recipe: Recipe,
    config: DecodingConfig,
    recogniser: Recogniser,
    languages: dict[Vocabulary, Language],
    pools: dict[Vocabulary, SearchPool],
    of: str,
    texts: Sequence[str],
    bars: Bars,
) -> TunedSearch:
    name, trials = recipe.data.valid, list[Trial]()
    if name is None:
        vocabulary = _likely(languages, texts)
        weights, count = given(config), 0
    else:
        speech_set = SpeechSet.open(recipe.data.set_folder(name))
        count = min(len(speech_set), MOST_TUNED)
        among = np.linspace(0, len(speech_set) - 1, count).round().astype(int).tolist()
        utterances: dict[str, NDArray[np.float32]] = {}
        for names, heard in recogniser.heard(speech_set, 120.0, partial(bars, f"hearing {name}"), among):
            utterances.update(zip(names, _rows(heard.log_probs, heard.lengths), strict=True))
        references = {speech_set.id(index): speech_set.text(index) for index in among}
        ordered = {each: utterances[each] for each in references}
        best, trials = tune(pools, ordered, references, config)
        vocabulary, weights = best.vocabulary, best.weights
    language = languages[vocabulary]
    return TunedSearch(
        of=of,
        vocabulary=vocabulary,
        num_words=len(language.words or ()),
        order=language.order,
        weights=weights,
        tuned_on=name,
        num_utterances=count,
        trials=tuple(trials),
    )


def _languages(
    config: DecodingConfig, texts: Sequence[str], tokenizer: Tokenizer, home: Path
) -> dict[Vocabulary, Language]:
    """The language model of each vocabulary that the recipe allows; those that are estimated are written to `home`."""
    found: dict[Vocabulary, Language] = {}
    is_limited = config.word_list is not None or config.lm is not None
    if config.vocabulary != "open":
        file, model = config.lm, None if config.lm is None else NgramModel.read(config.lm)
        if file is None or model is None:
            file, model = (
                home / LANGUAGE_FILES["closed"],
                estimate([each.split() for each in texts], _order(config, "closed")),
            )
            model.write(file)
        if config.word_list is not None:
            words = read_words(config.word_list)
        else:
            words = words_of(texts) if config.lm is None else model.words
        found["closed"] = Language(file, model.order, _spelled(words, tokenizer, config))
    if config.vocabulary == "open" or (config.vocabulary is None and not is_limited):
        names = tokenizer.names
        model = estimate([[names[token] for token in tokenizer.encode(each)] for each in texts], _order(config, "open"))
        model.write(home / LANGUAGE_FILES["open"])
        found["open"] = Language(home / LANGUAGE_FILES["open"], model.order, None)
    return found


def _order(config: DecodingConfig, vocabulary: Vocabulary) -> int:
    return config.order or _ORDERS[vocabulary]


def _spelled(words: Iterable[str], tokenizer: Tokenizer, config: DecodingConfig) -> list[str]:
    """The words that the tokens can spell, sorted. Raises ConfigError if there are none."""
    found = []
    example = None
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


def _likely(languages: dict[Vocabulary, Language], texts: Sequence[str]) -> Vocabulary:
    """The vocabulary where there is nothing to tune on: open if more than a hundredth of the words to come will be
    unknown, by Good and Turing's estimate, the share of words that the training texts have once."""
    if len(languages) == 1:
        return next(iter(languages))
    counts = Counter(word for text in texts for word in text.split())
    once = sum(count == 1 for count in counts.values())
    return "open" if once > RARE * counts.total() else "closed"


def _training_texts(recipe: Recipe) -> list[str]:
    train = open_training_set(recipe)
    return [train.text(index) for index in range(len(train))]


def _digest(recipe: Recipe, config: DecodingConfig, recogniser: Recogniser, texts: Sequence[str]) -> str:
    """Of all that the tuned weights depend on."""
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
    """The tuned search in a file; None if it is missing, damaged or of something else."""
    try:
        tuned = TunedSearch.model_validate_json(path.read_bytes())
    except (OSError, ValueError, ValidationError, RecursionError):
        return None
    return tuned if tuned.of == of else None


def _rows(log_probs: Tensor, frames: Tensor) -> list[NDArray[np.float32]]:
    """The log-probabilities `[T, V]` of each utterance of a batch, without padding."""
    rows = log_probs.float().cpu().numpy()
    return [np.ascontiguousarray(row[:length]) for row, length in zip(rows, frames.tolist(), strict=True)]
