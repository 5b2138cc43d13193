"""Loading speech for training, beside lhotse's own reading of the same shards; everything on one core.

Processor time of the loading thread is compared, with the shards in the page cache: otherwise, a slow disk or a shared
machine would be measured.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
from lhotse import CutSet, Fbank, FbankConfig

from benchmarks.measuring import Bar
from benchmarks.runs import median_ratio
from benchmarks.speech_writer import SpeechWriter
from starling.chance import derive_seed
from starling.errors import DataError
from starling.speech.batch_plan import BatchConfig, ShardWindows
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.prepare import prepare
from starling.speech.recipe import load_recipe
from starling.speech.store import Member, SpeechSet, SpeechSets
from starling.speech.tokens import CharacterTokenizer
from starling.speech.training.plan import Planner
from starling.speech.training.workload import load_batch

ROUNDS = 7
LEAST_SPEED, LEAST_RATIO = 1000.0, 1.3
"""Bars: seconds of audio per second of one core, and the ratio to lhotse's plain iteration."""
SYNTHETIC = 600
"""Number of utterances of the synthetic corpus, which is always available."""
READ_SECONDS = 10.0
"""Length of an utterance of read speech, the usual case: utterances of sentence corpora last 10 to 15 s."""
RECIPES = Path(__file__).parents[1] / "recipes"


def measure(folder: Path) -> list[Bar]:
    """Bars for each corpus: connected digits and read sentences where available, and synthetic speech."""
    return [bar for name, speech in corpora(folder) for bar in compared(name, speech)]


def corpora(folder: Path) -> Iterator[tuple[str, SpeechSet]]:
    """The prepared sets to load; some also with the same audio in utterances of 10 s."""
    demo = [f"data.corpus.sets={{train: {SYNTHETIC}, dev: 1, test: 1}}", "data.valid=null", "data.test=[]"]
    synthetic = _prepared("demo.yaml", folder / "loading-demo", demo)
    yield "synthetic", synthetic
    yield "synthetic", _joined(synthetic, folder / "loading-demo-long")
    try:
        digits = _prepared("fsdd.yaml", folder / "loading-fsdd", ["data.test=[]"])
        read = _prepared("speechocean.yaml", folder / "loading-speechocean", ["data.valid=null", "data.test=[]"])
    except DataError:  # real recordings are no part of the project
        return
    yield "connected digits", digits
    yield "read sentences", read
    yield "read sentences", _joined(read, folder / "loading-speechocean-long")


def _prepared(recipe: str, folder: Path, changes: Iterable[str]) -> SpeechSet:
    data = load_recipe(RECIPES / recipe, [f"data.folder={folder}", *changes]).data
    prepare(data)
    return SpeechSet.open(data.set_folder(data.train))


def _joined(speech: SpeechSet, folder: Path) -> SpeechSet:
    """A set with the same audio in utterances of about 10 s."""
    together = max(1, round(READ_SECONDS * len(speech) / speech.summary.seconds))
    with SpeechWriter(folder, speech.name, speech.sampling_rate) as writer:
        for number, first in enumerate(range(0, len(speech), together)):
            indices = range(first, min(first + together, len(speech)))
            audio = np.concatenate([speech.audio(index) for index in indices])
            text = " ".join(speech.text(index) for index in indices)
            writer.write(f"long-{number}", speech.speaker(indices[0]), text, audio)
        writer.finish(digest="joined")
    return SpeechSet.open(folder)


def compared(name: str, speech: SpeechSet) -> list[Bar]:
    """Bars for one set: all ways of reading it are measured one after another, repeatedly and in alternating order."""
    ways: dict[str, Callable[[], None]] = {
        "ours": lambda: load_epoch(speech),
        "lhotse": lambda: lhotse_iteration(speech),
        "lhotse with features": lambda: lhotse_features(speech),
        "ours without features": lambda: read_epoch(speech),
    }
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(ROUNDS + 1):
        for way in list(ways) if turn % 2 else list(reversed(ways)):
            begin = time.thread_time()
            ways[way]()
            if turn:  # the first fills caches
                speeds[way].append(speech.summary.seconds / (time.thread_time() - begin))
    each = speech.summary.seconds / len(speech)
    what = f"{name} ({speech.sampling_rate // 1000} kHz, {each:.1f} s each)"
    absolute = "times real time: " + ", ".join(f"{way} {median(speeds[way]):.0f}" for way in ways)
    return [
        Bar.at_least(f"loading {what}: times real time on one core", median(speeds["ours"]), LEAST_SPEED, absolute),
        Bar.at_least(
            f"loading {what}, with features: ours / lhotse's plain Shar iteration, without",
            median_ratio(speeds["ours"], speeds["lhotse"]),
            LEAST_RATIO,
            absolute,
        ),
        Bar.at_least(
            f"loading {what}: ours / lhotse's Shar iteration, both with features",
            median_ratio(speeds["ours"], speeds["lhotse with features"]),
            LEAST_RATIO,
            absolute,
        ),
        Bar.at_least(
            f"loading {what}: ours in random order / lhotse's Shar iteration in order, audio only",
            median_ratio(speeds["ours without features"], speeds["lhotse"]),
            LEAST_RATIO,
            absolute,
        ),
    ]


def epoch_of(speech: SpeechSet) -> Iterator[np.ndarray]:
    """The micro-batches of an epoch, in random order, as in training."""
    union = SpeechSets([Member("all", speech.folder)])
    config = BatchConfig()
    planner = Planner(union.durations, ShardWindows(union.shards, config.window, 1), config, seed=1, draws_seed=1)
    for number in range(planner.num_batches(0)):
        yield from planner.batch(0, number)


def load_epoch(speech: SpeechSet) -> None:
    """Load the audio, features, padding and tokens of every mini-batch with Starling."""
    log_mel = LogMel(FeatureConfig(), speech.sampling_rate)
    tokenizer = CharacterTokenizer("".join(sorted({letter for i in range(len(speech)) for letter in speech.text(i)})))
    for number, indices in enumerate(epoch_of(speech)):
        load_batch(speech, indices, log_mel, None, tokenizer, derive_seed(1, number))


def read_epoch(speech: SpeechSet) -> None:
    """Load the audio of every mini-batch with Starling."""
    for indices in epoch_of(speech):
        speech.read(indices.tolist())


def lhotse_iteration(speech: SpeechSet) -> None:
    """Load every cut of the shards with its audio, in order, with lhotse."""
    for cut in CutSet.from_shar(in_dir=speech.folder / "shar"):
        cut.load_audio()


def lhotse_features(speech: SpeechSet) -> None:
    """Load every cut of the shards with its log-mel features, in order, with lhotse."""
    bands = FeatureConfig().mels_at(speech.sampling_rate)
    extractor = Fbank(FbankConfig(sampling_rate=speech.sampling_rate, num_filters=bands))
    for cut in CutSet.from_shar(in_dir=speech.folder / "shar"):
        extractor.extract(cut.load_audio(), speech.sampling_rate)
