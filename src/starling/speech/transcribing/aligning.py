"""Finds when the words and phones of a known text begin and end in a recording.

CTC locates a token only roughly: its outputs are tens of milliseconds apart, and a token may be emitted anywhere within
its sound. A second model therefore processes a frame every 10 ms. It has a Gaussian for each sixth of a phone, which is
learnt from the experiment's training set, starting from CTC's alignment.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from safetensors import SafetensorError, safe_open

from starling.chance import derive_seed
from starling.configuration import digest
from starling.errors import ConfigError, DataError, did_you_mean, noted
from starling.files import replace_file, save_tensors, writing
from starling.reporting.progress import Bars, Say
from starling.speech.audio import opened
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.hybrid import Frames, FrameWriter
from starling.speech.hybrid.alignment import SPLICE, StateSequences, align_with_gaussians, estimated
from starling.speech.hybrid.tying import StateSpeller
from starling.speech.hybrid.viterbi import path_of
from starling.speech.store import SpeechSet
from starling.speech.tokens import PhonesConfig, make_phones, read_lexicon
from starling.speech.trained import load_recogniser, open_experiment
from starling.speech.transcribing.segmenter import Piece, runs
from starling.speech.transcribing.transcriber import Transcriber
from starling.speech.transcribing.transcript import Seconds, Segment, Word

FORMATS = ("textgrid", "ctm", "json")
_TEXTGRID = Path(__file__).parent / "textgrid.jinja"
_PER_PHONE, _ROUNDS = 6, 10
"""Number of states of a phone, which therefore lasts at least 60 ms; with fewer states, weak fricatives, such as F, are
mistaken for silence. Also the number of rounds of alignment."""
_LATE: Seconds = 0.08
"""Time by which the first round assumes that words begin earlier than CTC hears them. A word that begins too late is
not corrected in later rounds, because a weak sound that was once aligned with silence then resembles silence."""
_CLOSURE, _AUDIBLE = 6, 0.25
"""Longest silence, in frames, with which a word may begin, such as the closure of a stop. Also the amount, averaged
over bands, by which a frame with sound exceeds the lowest features of its recording."""
_NOT_SPEECH = -1000.0
"""Logarithm of the probability that a word begins with a frame of a pause."""
_ENOUGH: Seconds = 1500.0
"""Maximum seconds of training audio. More audio hardly changes the Gaussians."""
_LONGEST: Seconds = 300.0
"""Maximum length of a recording. Memory grows with the square of the length."""
_TOGETHER: Seconds = 60.0
"""Length above which a recording is aligned in parts."""


@dataclass(frozen=True)
class Span:
    """A phone and its times, in seconds from the beginning of the recording."""

    text: str
    start: Seconds
    end: Seconds


@dataclass(frozen=True)
class AlignedWord(Span):
    """A word, with its times and its phones."""

    phones: tuple[Span, ...]


@dataclass(frozen=True)
class Alignment:
    """The words of a recording, in order, with their times."""

    words: tuple[AlignedWord, ...]
    seconds: Seconds
    """Length of the recording."""

    def formatted(self, form: str, name: str) -> str:
        """The alignment in one of the `FORMATS`. `name` is the recording's name in CTM and JSON."""
        if form == "json":
            made = {"file": name, "seconds": self.seconds, "words": [asdict(each) for each in self.words]}
            return json.dumps(made, ensure_ascii=False) + "\n"
        if form == "ctm":
            recording = "_".join(name.split())
            times = ((f"{each.start:.3f} {each.end - each.start:.3f}", each.text) for each in self.words)
            return "".join(f"{recording} 1 {time} {word}\n" for time, word in times)
        from jinja2 import Environment

        spans = {"words": self.words, "phones": [phone for word in self.words for phone in word.phones]}
        tiers = {name: list(self._without_gaps(each)) for name, each in spans.items()}
        environment = Environment(trim_blocks=True, keep_trailing_newline=True)
        template = environment.from_string(_TEXTGRID.read_text(encoding="utf-8"))
        return template.render(seconds=self.seconds, tiers=tiers)

    def _without_gaps(self, spans: Sequence[Span]) -> Iterator[Span]:
        """Fill the gaps between spans with spans that have an empty text, because Praat's tiers have no gaps."""
        end = 0.0
        for each in spans:
            if each.start > end:
                yield Span("", end, each.start)
            yield each
            end = each.end
        if end < self.seconds:
            yield Span("", end, self.seconds)


def align_files(
    experiment: Path,
    inputs: Sequence[Path],
    text: Path | None,
    form: str,
    output: Path | None,
    phones: PhonesConfig | None,
    tell: Say,
    console: Console,
) -> None:
    """Align recordings with their texts, using the newest model of an experiment.

    Args:
        text: The file with the text of the only recording. With None, the text of each recording is in a file beside
            the recording whose name ends in `.txt`.
        form: One of the `FORMATS`.
        output: A file for the alignment of one recording, or a folder for those of several; None passes them to `tell`.
        phones: How words are pronounced. With None, words are pronounced as in training or, if the model has no phones,
            as they are spelled.

    Raises:
        DataError: Some recordings cannot be aligned. The message names them after all others have been aligned.
        ConfigError: The model was not trained with CTC, or the arguments contradict each other.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format {form}: unknown; {did_you_mean(form, FORMATS)}known are {', '.join(FORMATS)}")
    if len(inputs) > 1 and (text is not None or (output is not None and output.is_file())):
        raise ConfigError(
            f"{len(inputs)} recordings: leave out --text, put the text of each beside it, as NAME.txt, and give a "
            "folder as --output"
        )
    if len(inputs) > 1 and output is None and form == "textgrid":
        raise ConfigError(
            f"{len(inputs)} recordings: a TextGrid has one; give a folder as --output, or use ctm or json"
        )
    if output is not None and len({path.stem for path in inputs}) < len(inputs):
        raise ConfigError(
            f"--output {output}: several recordings have the same name without its ending; run them apart"
        )
    if not any(path.is_file() for path in inputs):  # fail before the aligner is trained in vain
        raise DataError(f"{inputs[0]}: no such file")
    problems = list[str]()
    with Bars(console) as bars:
        aligner = load_aligner(experiment, phones, bars)
        for number, path in enumerate(inputs):
            bars("aligning", number, len(inputs))
            with noted(problems, DataError):
                samples, words = aligner.samples(path), aligner.text(text or path.with_suffix(".txt"))
                try:
                    found = aligner.align(samples, words)
                except DataError as error:
                    raise DataError(f"{path}: {error}") from error
                _write(found.formatted(form, path.stem), path, form, output, len(inputs) > 1, tell)
    if problems:
        several = f"{len(problems)} of {len(inputs)} recordings cannot be aligned: " if len(inputs) > 1 else ""
        raise DataError(several + "; ".join(problems))


def load_aligner(experiment: Path, phones: PhonesConfig | None, bars: Bars) -> "Aligner":
    """The aligner of an experiment, which is trained the first time it is loaded. Arguments and errors are those of
    `align_files`."""
    folder, recipe = open_experiment(experiment)
    if recipe.loss != "ctc":
        raise ConfigError(f"{experiment}: was trained with loss: {recipe.loss}; align needs a model trained with CTC")
    config = phones or recipe.model.phones or PhonesConfig(voice=None)
    name = config.voice or "spelling"
    if config.lexicon is not None:
        name = f"lexicon-{digest(read_lexicon(config.lexicon))[:16]}"
    path, transcriber = folder.path / "align" / f"{name}.safetensors", Transcriber(load_recogniser(experiment))
    if path.exists():
        return Aligner.load(path, transcriber, config)
    with closing(SpeechSet.open(recipe.data.set_folder(recipe.data.train))) as training:
        made = Aligner.learn(transcriber, training, config, bars)
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        made.save(path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    return made


def _write(text: str, path: Path, form: str, output: Path | None, are_several: bool, tell: Say) -> None:
    if output is None:
        tell(text.removesuffix("\n"))
        return
    if are_several or output.is_dir():
        output /= f"{path.stem}.{'TextGrid' if form == 'textgrid' else form}"
    with writing(f"--output {output}", "name another file or folder"):
        output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(output, text)


class _Pronunciations:
    """Maps words to the ids of their phones, for a `StateSpeller`. Phones have the same ids as in training."""

    def __init__(self, config: PhonesConfig, names: Sequence[str]) -> None:
        self.config, self.names = config, tuple(names)
        self._known: dict[str, list[int]] = {}

    def add(self, texts: Sequence[str]) -> None:
        """Pronounce the words of texts. Raises DataError if a word cannot be pronounced, or has a phone without an
        id."""
        words = sorted({word for text in texts for word in text.split()} - self._known.keys())
        if not words:
            return
        try:
            made, missing = make_phones(self.config, words)
        except DataError:  # not one of them
            missing = words
        if missing:
            raise DataError(f"the word {missing[0]!r} has no pronunciation; spell it as pronounced, or use a lexicon")
        for word in words:
            phones = [made.names[number - 1] for number in made.words[word]]
            if new := [each for each in phones if each not in self.names]:
                raise DataError(f"the word {word!r} has the phone {new[0]!r}, which no word of the training set has")
            self._known[word] = [self.names.index(each) + 1 for each in phones]

    def encode(self, text: str, utterance: str = "") -> list[int]:
        """The ids of the phones of a word that has been added."""
        return self._known[text]


class Aligner:
    """Finds the words and phones of a text with Gaussians, given as `weights` `[D, K]` and `biases` `[K]`. The K states
    are silence and, for each phone in `names`, `_PER_PHONE` states."""

    def __init__(
        self, transcriber: Transcriber, config: PhonesConfig, names: Sequence[str], gaussians: Sequence[torch.Tensor]
    ) -> None:
        self.names, self.gaussians = tuple(names), tuple(gaussians)
        self._transcriber = transcriber
        self._layer = layer_of(transcriber)
        self._pronounced = _Pronunciations(config, names)
        self._speller = StateSpeller(self._pronounced, _PER_PHONE, 0)

    def align(self, samples: NDArray[np.float32], text: str) -> Alignment:
        """Align a recording `[T]`, sampled at the recogniser's rate, with its text.

        Raises DataError for a recording longer than five minutes, or a text that is empty, has characters that the
        recogniser does not know, or is too long for the recording.
        """
        rate, words = self._transcriber.rate, text.split()
        seconds = len(samples) / rate
        if not np.any(samples):
            raise DataError("the recording is empty, or digital silence")
        if seconds > _LONGEST:
            raise DataError(f"lasts {seconds:.0f} s; the limit is {_LONGEST:.0f} s: cut it, and its text, at pauses")
        self._pronounced.add([text])
        rough = self._transcriber.timed(samples, text)  # also raises DataError for a text that cannot be aligned
        found: list[AlignedWord] = []
        for first, end in _stretches(rough):
            begin = (rough[first - 1].end + rough[first].start) / 2 if first else 0.0
            stop = (rough[end - 1].end + rough[end].start) / 2 if end < len(words) else seconds
            offset = round(begin * rate)
            found += self._spans(samples[offset : round(stop * rate)], words[first:end], offset / rate)
        return Alignment(tuple(found), round(seconds, 3))

    def timed(self, piece: Piece, segment: Segment) -> Segment:
        """A transcribed segment with exact word times; unchanged if a word has no pronunciation."""
        if not segment.words:
            return segment
        own = piece.own
        texts = [each.text for each in segment.words]
        try:
            self._pronounced.add(texts)
            found = list(self._spans(own.samples, texts, own.start / self._transcriber.rate))
        except DataError:
            return segment
        words = [replace(word, start=at.start, end=at.end) for word, at in zip(segment.words, found, strict=True)]
        return replace(segment, words=tuple(words))

    def samples(self, path: Path) -> NDArray[np.float32]:
        """Read a recording in the form that `align` expects. Raises DataError if it cannot be read."""
        with opened(path, str(path)) as sound:
            samples = np.concatenate([np.zeros(0, np.float32), *sound])
            return self._transcriber.recogniser.waveform(samples, sound.rate).numpy()

    def text(self, path: Path) -> str:
        """The words of a text file, in the recogniser's letter case. Raises DataError if the file cannot be read."""
        try:
            text = " ".join(path.read_text(encoding="utf-8").split())
        except (OSError, ValueError) as error:
            raise DataError(f"the text {path} cannot be read ({error})") from error
        for each in (text, text.upper(), text.lower()):
            with suppress(DataError):
                self._transcriber.recogniser.tokenizer.encode(each)
                return each
        return text

    def _spans(self, samples: NDArray[np.float32], words: Sequence[str], offset: Seconds) -> Iterator[AlignedWord]:
        """Yield the aligned words of a part of a recording. The part begins at `offset`."""
        frames = self._layer(torch.from_numpy(samples))
        states, optional = self._speller.text(" ".join(words))
        if len(frames) < len(states) - sum(optional):
            raise DataError(f"{len(samples) / self._transcriber.rate:.2f} s are too short for: {' '.join(words)}")
        around = torch.arange(len(frames))[:, None] + torch.arange(-SPLICE, SPLICE + 1)
        spliced = frames[around.clamp(0, len(frames) - 1)].flatten(1)
        weights, biases = self.gaussians
        labels = [number_of(part, unit) for part, unit, *_ in states]
        scores = torch.addmm(biases, spliced, weights)[:, labels].numpy()
        lengths = [1 + _PER_PHONE * len(self._pronounced.encode(word)) for word in words]  # each after a silence
        beginnings = np.add.outer(np.cumsum([1, *lengths[:-1]]), np.arange(_PER_PHONE)).ravel()
        scores[np.ix_(in_pauses(frames), beginnings)] += _NOT_SPEECH
        path = path_of(scores, np.asarray(optional))
        shift = self._layer.frame_seconds

        def at(position: int) -> Seconds:
            """The time at which this position, or a later one, is first reached."""
            return round(offset + int(np.searchsorted(path, position)) * shift, 3)

        place = 1
        for word in words:
            phones = []
            for number in self._pronounced.encode(word):
                phones.append(Span(self.names[number - 1], at(place), at(place + _PER_PHONE)))
                place += _PER_PHONE
            yield AlignedWord(word, phones[0].start, phones[-1].end, tuple(phones))
            place += 1  # skip the silence

    def save(self, path: Path) -> None:
        """Write the Gaussians and the names of the phones."""
        weights, biases = self.gaussians
        save_tensors(path, {"weights": weights.contiguous(), "biases": biases}, {"phones": json.dumps(self.names)})

    @classmethod
    def load(cls, path: Path, transcriber: Transcriber, config: PhonesConfig) -> "Aligner":
        """Load the aligner that `save` wrote. Raises DataError for any other file."""
        try:
            with safe_open(path, "pt") as file:
                names = json.loads(file.metadata()["phones"])
                weights, biases = (file.get_tensor(each) for each in ("weights", "biases"))
            if len(biases) != 1 + _PER_PHONE * len(names):
                raise ValueError(f"{len(biases)} states of {len(names)} phones")
            return cls(transcriber, config, names, [weights, biases])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: not what `starling align` writes ({error}); remove it to learn again") from error

    @classmethod
    def learn(cls, transcriber: Transcriber, training: SpeechSet, config: PhonesConfig, bars: Bars) -> "Aligner":
        """Learn the Gaussians for the pronunciations of `config` from up to 25 minutes of a training set."""
        texts = [training.text(index) for index in range(len(training))]
        phones, missing = make_phones(config, texts)
        pronounced = _Pronunciations(config, phones.names)
        unknown = set(missing)
        pronounced.add(list(phones.words))
        order = np.random.default_rng(derive_seed(0, "align")).permutation(len(training))
        chosen = order[: int(np.searchsorted(np.cumsum(training.durations[order]), _ENOUGH)) + 1].tolist()
        layer, used, starts = layer_of(transcriber), list[tuple[str, str]](), list[NDArray[np.int32]]()
        with tempfile.TemporaryDirectory() as folder:
            with closing(FrameWriter(Path(folder))) as writer:
                for done, index in enumerate(chosen, 1):
                    bars("learning word times from the training set", done, len(chosen))
                    text = texts[index]
                    if unknown & set(text.split()):
                        continue
                    try:
                        samples = training.audio(index)
                        features = layer(torch.from_numpy(samples))
                        rough = transcriber.timed(samples, text)
                        starts.append(_positions(rough, pronounced, in_pauses(features), layer.frame_seconds))
                    except DataError:  # the utterance is damaged, too short, or has an unknown token
                        continue
                    writer.write(index, features.numpy())
                    used.append((training.id(index), text))
            if not used:
                raise DataError(f"{training.name}: none of {len(chosen)} utterances can be aligned")
            frames = Frames(Path(folder), layer.num_bands)
            sequences = StateSequences.of(used, StateSpeller(pronounced, _PER_PHONE, 0))
            positions, _ = align_with_gaussians(frames, sequences, starts, _ROUNDS)
            labels = sequences.labelled([number_of(part, unit) for part, unit, *_ in sequences.states])
            gaussians = estimated(frames, labels, positions, 1 + _PER_PHONE * len(phones.names)).linear()
        return cls(transcriber, config, phones.names, gaussians)


def number_of(part: int, unit: int) -> int:
    """The index of the state for a part of a unit. Unit 0 is silence, whose state has index 0; units count from 1."""
    return 0 if unit == 0 else 1 + (unit - 1) * _PER_PHONE + part


def layer_of(transcriber: Transcriber) -> LogMel:
    """The features that the Gaussians model. They are computed from whole recordings, with a frame every 10 ms."""
    return LogMel(FeatureConfig(normalise="active"), transcriber.rate)


def in_pauses(frames: torch.Tensor) -> NDArray[np.bool_]:
    """A mask of the frames `[T, F]` that lie in stretches without sound longer than `_CLOSURE`."""
    silent = ((frames - frames.amin(0)).mean(1) < _AUDIBLE).numpy()
    for first, end in runs(silent):
        silent[first:end] = end - first > _CLOSURE
    return silent


def _positions(
    words: Sequence[Word], pronounced: _Pronunciations, pauses: NDArray[np.bool_], shift: Seconds
) -> NDArray[np.int32]:
    """The position of each frame in the sequence of a text's states. Words lie where CTC heard them, except in `pauses`
    `[frames]`, and the states of a word are equally long. Raises DataError if a word has fewer frames than states."""
    num_frames = len(pauses)
    counts = [_PER_PHONE * len(pronounced.encode(word.text)) for word in words]
    begins, earliest = list[int](), 0
    for word, count in zip(words, counts, strict=True):
        heard = round(word.start / shift)
        early = max(earliest, heard - round(_LATE / shift))
        silent = np.flatnonzero(pauses[early:heard])
        begins.append(int(early + silent[-1] + 1) if len(silent) else early)
        earliest = begins[-1] + count
    behind = [*begins[1:], num_frames]
    positions, place, last = np.zeros(num_frames, np.int32), 0, 0
    for word, count, begin, following in zip(words, counts, begins, behind, strict=True):
        end = min(round(word.end / shift), following)
        if end - begin < count:
            raise DataError(f"{end - begin} frames are too few for {word.text!r}")
        positions[last:begin] = place
        positions[begin:end] = place + 1 + np.arange(end - begin) * count // (end - begin)
        place, last = place + 1 + count, end
    positions[last:] = place
    return positions


def _stretches(words: Sequence[Word]) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges of words (first, last + 1) that are aligned together and span at most a minute. Words are
    divided at the widest gap in the second half of a minute, because CTC may be wrong about a narrow gap."""
    first = 0
    while words[-1].end - words[first].start > _TOGETHER:
        gaps = {
            number: words[number].start - words[number - 1].end
            for number in range(first + 1, len(words))
            if _TOGETHER / 2 <= words[number - 1].end - words[first].start <= _TOGETHER
        }
        end = max(gaps or [first + 1], key=lambda number: gaps.get(number, 0.0))
        yield first, end
        first = end
    yield first, len(words)
