"""The set-up of frame-level training, which aligns the training set."""

import os
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from starling.errors import ConfigError, DataError
from starling.experiment.folder import ExperimentFolder
from starling.files import writing
from starling.reporting.progress import Say
from starling.speech.decoding import DecodingConfig
from starling.speech.features import LogMel
from starling.speech.hybrid import AlignmentConfig, Frames, FrameWriter, StatesConfig, save_states
from starling.speech.hybrid.alignment import (
    Labels,
    StateSequences,
    align,
    align_with_gaussians,
    flat_start,
    from_ctc,
    tie_states,
)
from starling.speech.hybrid.tying import StateSpeller, TiedStates, check_words, read_words, words_of
from starling.speech.hybrid.viterbi import ctc_row
from starling.speech.recipe import Recipe
from starling.speech.recogniser import Recogniser
from starling.speech.resampling import resampled
from starling.speech.store import SpeechSets, Stored
from starling.speech.tokens import CharacterTokenizer, Tokenizer
from starling.speech.trained import load_newest
from starling.speech.usable import TooShort, frames_needed, kept_utterances, transcripts

_READ_TOGETHER = 32
"""Number of utterances whose features are computed together."""
_ROUNDS_AFTER_FLAT_START, _ROUNDS_AFTER_CTC = 20, 5


def too_few_frames(recipe: Recipe, train: SpeechSets, tokenizer: Tokenizer, features: LogMel) -> list[TooShort]:
    """The utterances that have fewer frames than states that cannot be skipped."""
    speller = _speller(recipe, tokenizer)
    found = []
    for number, (name, text, seconds) in enumerate(transcripts(train)):
        _, optional = speller.text(text, name)
        num_frames = features.num_frames(round(seconds * train.sampling_rate / max(recipe.augment.speed)))
        if num_frames < (needed := optional.count(False)):
            found.append(TooShort(name, num_frames, needed, number))
    return found


def make_frames(
    recipe: Recipe, train: SpeechSets, tokenizer: Tokenizer, features: LogMel, folder: ExperimentFolder, say: Say
) -> TiedStates:
    """Store the features of the training set in `folder.frames`, align them, and return their tied states.

    A resumed run uses the files that the previous run stored. Raises ConfigError or DataError if the data, the words or
    the aligning model cannot be used.
    """
    decoding = recipe.decoding or DecodingConfig()
    if decoding.word_list is not None:
        words = read_words(decoding.word_list)
    else:
        words = words_of([train.text(index) for index in range(len(train))])
    if recipe.resume is not None:
        before = ExperimentFolder(recipe.resume.parent.parent)
        if not before.frames.is_dir():
            raise DataError(f"{before.frames}: the aligned frames of the run to resume are missing; train again")
        shutil.copytree(before.frames, folder.frames, copy_function=_link)
        if (states := Recogniser.load(before.initial).states) is None:
            raise DataError(f"{before.initial}: the model has no tied states; train again without resume")
        states = states.model_copy(update={"words": tuple(words), "decoding": decoding})
    else:
        kept = kept_utterances(train, folder.too_short)
        with writing(folder.frames):
            _store(recipe, kept, features, folder.frames, say)
            states = _align(recipe, train, tokenizer, Frames(folder.frames, features.num_bands), words, say)
    check_words(states, tokenizer)
    return states


def _speller(recipe: Recipe, tokenizer: Tokenizer) -> StateSpeller:
    config = recipe.states or StatesConfig()
    return StateSpeller(tokenizer, config.per_unit, config.context)


def _link(source: str, target: str) -> None:
    """Link a file, or copy it if the target is on a different file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _store(recipe: Recipe, train: SpeechSets, features: LogMel, folder: Path, say: Say) -> None:
    """Write the features of all usable utterances, at every speed of the recipe."""
    num_written = 0
    bad: list[str] = []
    speeds = sorted(set(recipe.augment.speed))
    with closing(FrameWriter(folder)) as writer:
        for first in range(0, len(train), _READ_TOGETHER):
            end = min(first + _READ_TOGETHER, len(train))
            usable: list[tuple[int, float]] = []
            waveforms: list[Tensor] = []
            for number, stored in zip(train.numbers[first:end].tolist(), train.read(range(first, end)), strict=True):
                try:
                    heard = [_at_speed(stored, speed, features) for speed in speeds]
                except DataError as error:
                    if recipe.data.filter.on_bad == "fail":
                        raise
                    bad.append(str(error))
                else:
                    usable += [(number, speed) for speed in speeds]
                    waveforms += heard
            matrices = features.bands(waveforms) if waveforms else []
            for (number, speed), matrix in zip(usable, matrices, strict=True):
                writer.write(number, matrix.numpy(), speed)
            num_written += len(usable)
    if len(bad) > recipe.data.filter.skippable(len(train)):
        raise DataError(
            f"{train.name}: {len(bad)} of {len(train)} utterances cannot be used, such as: {bad[0]}; "
            f"data.filter.max_skipped allows {recipe.data.filter.max_skipped:.2%}"
        )
    if not num_written:
        raise DataError(f"{train.name}: no utterance can be aligned, so there are no frames to train on")
    if bad:
        say(f"{train.name}: {len(bad)} utterances cannot be used and are left out, such as: {bad[0]}")


def _at_speed(utterance: Stored, speed: float, features: LogMel) -> Tensor:
    """The waveform `[T]` of an utterance at `speed` times its speed. Raises DataError if no features can be computed
    from the utterance."""
    waveform, rate = features.checked(utterance.samples, utterance.id), features.sampling_rate
    return features.checked(resampled(waveform, round(rate * speed), rate), utterance.id)


def _align(
    recipe: Recipe, train: SpeechSets, tokenizer: Tokenizer, frames: Frames, words: list[str], say: Say
) -> TiedStates:
    """Align all frames, tie their states, store the states, and return them."""
    wanted, config = recipe.states or StatesConfig(), recipe.alignment or AlignmentConfig()
    texts = [(train.id(number), train.text(number)) for number in frames.utterances.tolist()]
    transcripts = StateSequences.of(texts, _speller(recipe, tokenizer))
    how, rounds = "a flat start", _ROUNDS_AFTER_FLAT_START
    if config.experiment is None:
        positions = flat_start(transcripts, frames.lengths)
    else:
        aligner = _Aligner(_load_aligner(config.experiment, recipe), train, frames, transcripts, wanted.per_unit)
        if (states := aligner.model.states) is None:
            how, rounds = f"the CTC model of {config.experiment}", _ROUNDS_AFTER_CTC
            positions = aligner.by_ctc()
        else:
            how, rounds = f"the tied states of {config.experiment}", 0
            positions = aligner.by_states(states, texts)
    rounds = rounds if config.rounds is None else config.rounds
    positions, changed = align_with_gaussians(frames, transcripts, positions, rounds)
    line = f"{frames.ends[-1]:,} frames aligned from {how}"
    say(f"{line}, {rounds} rounds, the last of which moved {changed:.2%} of them" if rounds else line)
    tree, tied = tie_states(frames, transcripts, positions, wanted.number, wanted.min_frames)
    save_states(frames.folder, tied)
    if tree.num_states < wanted.number:
        say(
            f"{tree.num_states} tied states, and states.number is {wanted.number}: the training texts have "
            f"{len(transcripts.states)} different states in context, and a tied state needs at least "
            f"{wanted.min_frames} frames"
        )
    counts = np.zeros(tree.num_states)
    for each in tied:
        counts += np.bincount(each, minlength=tree.num_states)
    log_priors = np.log(np.maximum(counts, 0.5) / counts.sum())
    return TiedStates(
        roots=tree.roots,
        nodes=tree.nodes,
        per_unit=wanted.per_unit,
        context=wanted.context,
        log_priors=log_priors.tolist(),
        words=tuple(words),
        decoding=recipe.decoding or DecodingConfig(),
    )


def _load_aligner(source: Path, recipe: Recipe) -> Recogniser:
    """Load the aligning model. Raises ConfigError if its frames or characters differ from those of the recipe."""
    model = load_newest(source)
    if model.features.sampling_rate != recipe.data.sampling_rate:
        raise ConfigError(
            f"alignment.experiment: {source} hears {model.features.sampling_rate} Hz, and data.sampling_rate is "
            f"{recipe.data.sampling_rate}; align with a model that has this sampling rate"
        )
    if model.features.config.frame_shift != recipe.features.frame_shift:
        raise ConfigError(
            f"alignment.experiment: {source} has a frame every {model.features.config.frame_shift} s, and "
            f"features.frame_shift is {recipe.features.frame_shift}; align with a model that has this frame shift"
        )
    if not isinstance(model.tokenizer, CharacterTokenizer):
        raise ConfigError(f"alignment.experiment: {source} has no characters as tokens; align with a model that has")
    return model


@dataclass(frozen=True)
class _Aligner:
    """A trained model that aligns the stored frames of a training set."""

    model: Recogniser
    train: SpeechSets
    frames: Frames
    transcripts: StateSequences
    per_unit: int

    def by_states(self, states: TiedStates, texts: list[tuple[str, str]]) -> Labels:
        """Align by the scaled likelihoods of the model's tied states, and return the position of each frame."""
        if states.per_unit != self.per_unit:
            raise ConfigError(
                f"alignment.experiment: its model has {states.per_unit} states per character, but states.per_unit is "
                f"{self.per_unit}; choose the same"
            )
        own = StateSequences.of(texts, states.speller(self.model.tokenizer))
        labels = own.labelled([states.tied(state) for state in own.states])
        score = partial(self._scores, range(len(self.frames)))
        return align(self.frames.lengths, labels, self.transcripts.optional, score)

    def by_ctc(self) -> Labels:
        """Align by the best path of a CTC model, and return the position of each frame. An utterance that is too short
        for CTC is divided equally among its positions."""
        frames, config, encode = self.frames, self.model.model_config, self.model.tokenizer.encode
        numbers = frames.utterances.tolist()
        texts = [" ".join(self.train.text(number).split()) for number in numbers]
        tokens = [encode(text, self.train.id(number)) for text, number in zip(texts, numbers, strict=True)]
        emitted = np.asarray([config.encoder_frames(int(length)) for length in frames.lengths])
        positions = flat_start(self.transcripts, frames.lengths)
        fits = [each for each in range(len(frames)) if emitted[each] >= frames_needed(tokens[each])]
        rows = [ctc_row(tokens[each]) for each in fits]
        score = partial(self._scores, fits)
        paths = align(emitted[fits], [labels for labels, _ in rows], [skips for _, skips in rows], score)
        for place, path in enumerate(paths):
            each = fits[place]
            length = int(frames.lengths[each])
            positions[each] = from_ctc(path, config.subsampling, length, texts[each], self.per_unit)
        return positions

    def _scores(self, chosen: Sequence[int], places: Sequence[int]) -> Tensor:
        """The model's log-probabilities for some of the `chosen` stored utterances of the training set."""
        stored, features = [chosen[place] for place in places], self.model.features
        numbers, speeds = self.frames.utterances[stored].tolist(), self.frames.speeds[stored].tolist()
        heard = zip(self.train.read(numbers), speeds, strict=True)
        log_probs = self.model.listen([_at_speed(*each, features) for each in heard]).log_probs
        return log_probs if self.model.states is None else self.model.states.scaled(log_probs)
