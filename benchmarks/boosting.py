"""What boosted phrases recover, get wrong, and cost: `python -m benchmarks.boosting exp/demo`.

Three lists are boosted: the ten words that greedy decoding misses most often in the validation set, twenty phrases that
are never spoken in the sets, and both. At the end, a voice of the demo's test set says `CALL` and one of the twenty
phrases.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time

import numpy as np
import torch
from numpy.typing import NDArray

from starling.speech.corpora.synthetic import VOICES, add_noise, draw_sentence
from starling.speech.espeak import speak
from starling.speech.recogniser import Recogniser
from starling.speech.scoring import count_errors, references_of
from starling.speech.store import SpeechSet
from starling.speech.trained import load_recogniser, open_experiment
from starling.speech.transcribing.transcriber import Transcriber

NEW = (
    "ALICE", "FELIX", "HUGO", "LEON", "MARTHA", "NINA", "NORA", "OSCAR", "SOPHIE", "THEODORE", "VICTORIA", "DUNDEE",
    "EXETER", "LONDON", "PARIS", "ROME", "TORONTO", "RADIO", "FRONT DOOR", "FOUR THIRTY",
)  # fmt: skip
WEIGHTS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
COUNTS = (0, 10, 100, 1000)
"""Numbers of phrases whose cost is measured."""
_REPEATS, _CALLS, _SNR = 5, 100, (15.0, 40.0)


@dataclass(frozen=True)
class Set:
    """A set, with the outputs of the network for each utterance, and greedy texts."""

    name: str
    references: Mapping[str, str]
    outputs: Mapping[str, NDArray[np.float32]]
    greedy: Mapping[str, str]

    @classmethod
    def stored(cls, recogniser: Recogniser, folder: Path, name: str) -> "Set":
        speech_set, outputs, greedy = SpeechSet.open(folder), {}, {}
        for names, heard in recogniser.heard(speech_set):
            outputs.update(zip(names, heard.rows, strict=True))
            greedy.update(zip(names, recogniser.texts(heard), strict=True))
        return cls(name, references_of(speech_set), outputs, greedy)

    @classmethod
    def calls(cls, recogniser: Recogniser) -> "Set":
        random, texts = np.random.default_rng(7), [f"CALL {NEW[number % len(NEW)]}" for number in range(_CALLS)]
        sentences = [draw_sentence(random, text, VOICES["test"], (90, 135), (35, 65)) for text in texts]
        references, outputs, greedy = {}, {}, {}
        for number, (samples, rate) in enumerate(speak(sentences)):
            audio = add_noise(samples.astype(np.float32) / 32768.0, random, _SNR)
            heard, name = recogniser.listen([recogniser.waveform(audio, rate)]), f"call-{number}"
            references[name], (outputs[name],), (greedy[name],) = texts[number], heard.rows, recogniser.texts(heard)
        return cls("calls", references, outputs, greedy)


def counted(texts: Iterable[str], phrases: Sequence[str]) -> list[Counter[str]]:
    """Number of occurrences of each phrase in each text."""
    spaced = {phrase: f" {phrase.replace(' ', '  ')} " for phrase in phrases}  # neighbours do not share a space
    return [
        Counter({phrase: f" {text} ".replace(" ", "  ").count(spaced[phrase]) for phrase in phrases}) for text in texts
    ]


def line(of: Set, texts: Mapping[str, str], phrases: Sequence[str]) -> str:
    """A line with the recall of the phrases, false alarms and the error rate."""
    pairs = zip(
        counted(of.references.values(), phrases),
        counted((texts[name] for name in of.references), phrases),
        strict=True,
    )
    spoken, found, wrong = np.sum([(a.total(), (a & b).total(), (b - a).total()) for a, b in pairs], axis=0)
    words, _ = count_errors(of.references, texts)
    return f"{found} of {spoken} recognised, {wrong} false alarms, {words.errors} word errors (WER {words.rate:.2f} %)"


def measure(experiment: Path) -> None:
    """Print all figures."""
    _, recipe = open_experiment(experiment)
    recogniser = load_recogniser(experiment)
    assert recipe.data.valid is not None
    names = (recipe.data.valid, recipe.data.test[0])
    valid, test = (Set.stored(recogniser, recipe.data.set_folder(name), name) for name in names)
    missed: Counter[str] = Counter()
    for name, text in valid.references.items():
        missed += Counter(text.split()) - Counter(valid.greedy[name].split())
    words = [word for word, _ in missed.most_common(10)]
    print(f"missed most often in {valid.name}: {', '.join(words)}")
    for title, listed in (("missed", words), ("unspoken", NEW), ("both", [*words, *NEW])):
        for each in (valid, test):
            sweep(recogniser, each, title, listed)
    sweep(recogniser, Set.calls(recogniser), "new", NEW)
    cost(recogniser, SpeechSet.open(recipe.data.set_folder(test.name)))


def sweep(recogniser: Recogniser, of: Set, title: str, listed: Sequence[str]) -> None:
    """Print a line for greedy decoding, and one for each weight."""
    print(f"{of.name}, {title}, greedy: {line(of, of.greedy, listed)}")
    for weight in WEIGHTS:
        phrases = recogniser.phrases([f"{phrase}\t{weight}" for phrase in listed], title)
        texts = {name: recogniser.placed(row, of.greedy[name], phrases=phrases)[0] for name, row in of.outputs.items()}
        print(f"{of.name}, {title}, weight {weight:g}: {line(of, texts, listed)}")


def cost(recogniser: Recogniser, speech_set: SpeechSet) -> None:
    """Print the processor time of greedy transcription of a set on one core, with phrases of random letters."""
    torch.set_num_threads(1)
    generator = np.random.default_rng(1)
    letters = [name for name in recogniser.tokenizer.names if name.isalpha()]
    drawn = ["".join(generator.choice(letters, generator.integers(4, 13))) for _ in range(max(COUNTS))]
    samples = np.concatenate([each.samples for each in speech_set.read(range(len(speech_set)))])
    times: dict[int, list[float]] = {count: [] for count in COUNTS}
    for count in COUNTS * _REPEATS:
        transcriber = Transcriber(recogniser).boosted(drawn[:count])
        begin = process_time()
        transcriber.transcribe(samples, speech_set.sampling_rate)
        times[count].append(process_time() - begin)
    seconds = len(samples) / speech_set.sampling_rate
    for count, taken in times.items():
        print(f"{count} phrases: {np.median(taken):.2f} s ({min(taken):.2f} to {max(taken):.2f}) for {seconds:.0f} s")


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
