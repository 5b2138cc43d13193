"""The set-up of a run before learners start, with the checks that need the data, and the warm start from another
experiment. This module also creates a recipe's job, and writes its models."""

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from starling.budget import Progress as Spent
from starling.chance import derive_seed
from starling.checkpoint.files import read_manifest
from starling.engines.processes.place import cores_here
from starling.errors import ConfigError, DataError, some
from starling.experiment.folder import ExperimentFolder
from starling.experiment.task import job_of
from starling.reporting.progress import Say
from starling.speech.corpora.lines import write_table
from starling.speech.features import LogMel
from starling.speech.hybrid.tying import TiedStates
from starling.speech.models import count_parameters
from starling.speech.models.architectures import PublishedConfig
from starling.speech.prepare import prepare_all
from starling.speech.prepare_stages import OnProgress
from starling.speech.recipe import Recipe, earlier_recipe
from starling.speech.recogniser import Recogniser
from starling.speech.store import SpeechSets
from starling.speech.tokens import Phones, Tokenizer, make_phones, make_tokenizer
from starling.speech.trained import load_newest
from starling.speech.training.frames import make_frames, too_few_frames
from starling.speech.training.plan import FramePlan, load_plan, open_training_set
from starling.speech.training.workload import FrameWorkload, SpeechWorkload
from starling.speech.usable import TooShort, too_short_for_ctc, transcripts
from starling.training.flat import split, trainable
from starling.training.freezing import OUTPUT, OUTPUTS, PHONES, Freeze, freeze, in_words
from starling.training.job import Job
from starling.training.tensor_plan import tensor_plan
from starling.training.tickets import TicketSequence

Seconds = float
MIN_AUDIO_FOR_PROCESSES: Seconds = 1800.0
"""Minimum audio that a learner must load in a run for loading processes to be worthwhile. With less audio, they take
longer to start than the time that they save. One core loads this much in 10 to 20 s."""
AUDIO_PER_SECOND = 100.0
"""Assumed seconds of audio that a learner trains on per second, used to estimate the audio of a budget in minutes."""
MAX_PROCESSES = 4
"""Maximum number of loading processes per learner on an accelerator, or with data from an object store."""


def set_up(recipe: Recipe, folder: ExperimentFolder, say: Say, progress: OnProgress | None = None) -> None:
    """Prepare the data, make the tokens, write the untrained recogniser to `folder.initial`, and list utterances that
    are too short for CTC in `folder.too_short`.

    Raises:
        ConfigError: The warm start or `freeze` does not fit the model, or the data cannot be divided among the
            learners.
        DataError: The training set is unreadable, is too small for the number of learners, contains characters
            outside the alphabet, or contains too many utterances that are too short for CTC or for their states.
        CheckpointError: The warm start's experiment has no intact checkpoint.
    """
    if (latency := recipe.model.latency(recipe.features.frame_shift, recipe.features.frame_length)) is not None:
        say(f"streaming model: an algorithmic latency of {1000 * latency:.0f} ms")
    say(prepare_all(recipe, progress))
    train = open_training_set(recipe)
    tokenizer = make_tokenizer(recipe.tokens, (train.text(index) for index in range(len(train))))
    features = LogMel(recipe.features, recipe.data.sampling_rate)
    if recipe.features.normalise == "global":
        features.fit(train, on_bad=recipe.data.filter.on_bad)
    _leave_out_too_short(recipe, train, tokenizer, features, folder.too_short, say)
    states = make_frames(recipe, train, tokenizer, features, folder, say) if recipe.loss == "frames" else None
    phones = _phones(recipe, train, say)
    recogniser = _untrained(recipe, features, tokenizer, states, phones, say)
    if recipe.island.tensor > 1:
        tensor_plan(recogniser.model)  # raises an error if the model has no plan
    for line in in_words(recogniser.model, recipe.freeze):
        say(line)
    recogniser.save(folder.initial)
    freeze(recogniser.model, recipe.freeze)
    workload = load_workload(recipe, folder)
    num_at_once = recipe.sync_group_size // recipe.island.tensor
    if (count := len(workload.plan.utterances)) < max(1, num_at_once):
        raise DataError(
            f"{count} utterances cannot be shared by {num_at_once} learners that step together: "
            f"use at most {count} learners or a larger training set"
        )
    for line in workload.plan.shares():
        say(line)
    if change := schedule_change(recipe, workload):
        say(change)
    batches = workload.num_batches(0)
    say(f"{count_parameters(recogniser.model):,} parameters, {_sizes(recipe, tokenizer.vocab_size, states, batches)}")
    size = "sequences.batch" if recipe.loss == "frames" else "batches.max_duration"
    if recipe.sync_group_size == 1 and batches < recipe.num_workers:
        say(
            f"warning: an epoch has {batches} mini-batches for {recipe.num_workers} learners, so some have none: "
            f"lower {size}, or use fewer learners"
        )
    shares = () if recipe.batch_shares == "auto" else recipe.batch_shares.values()
    step_size = num_at_once + sum(share - 1 for share in shares)
    if batches < step_size:
        say(
            f"warning: an epoch has {batches} mini-batches, and the {recipe.sync_group_size} learners that step "
            f"together take {step_size} at once, so one step takes mini-batches of several epochs: lower {size}, "
            "or use fewer learners"
        )


def _phones(recipe: Recipe, train: SpeechSets, say: Say) -> Phones | None:
    """The phones of the training set's words, or None if the model has no phones. A resumed run keeps its phones."""
    if recipe.model.phones is None:
        return None
    if recipe.resume is not None:
        return Recogniser.load(ExperimentFolder(recipe.resume.parent.parent).initial).phones
    phones, unknown = make_phones(recipe.model.phones, (train.text(index) for index in range(len(train))))
    say(f"{len(phones.names)} phones of {len(phones.words)} words")
    if unknown:
        say(
            f"warning: model.phones: {len(unknown)} of {len(phones.words) + len(unknown)} words have no known phones "
            f"({some(unknown, 3)}); utterances with such words are left out of the phone loss"
        )
    return phones


def _untrained(
    recipe: Recipe,
    features: LogMel,
    tokenizer: Tokenizer,
    states: TiedStates | None,
    phones: Phones | None,
    say: Say,
) -> Recogniser:
    """A recogniser before training. Its weights are drawn with the recipe's seed, loaded from a published checkpoint
    (which is not needed afterwards), or taken from another experiment."""
    model, published = recipe.model, None
    if isinstance(model, PublishedConfig):
        model, published = model.model_copy(update={"checkpoint": None}), model.checkpoint
    recogniser = Recogniser.create(model, features, tokenizer, derive_seed(recipe.seed, "model"), states, phones)
    if published is not None:
        from starling.speech.models.published import load_published

        say(load_published(recogniser.model, published))
    if recipe.warm_start is not None and recipe.resume is None:
        for line in warm_start(recogniser, recipe.warm_start.experiment, recipe.warm_start.sizes):
            say(line)
    return recogniser


def _sizes(recipe: Recipe, num_tokens: int, states: TiedStates | None, batches: int) -> str:
    """A description of the outputs, the mini-batches, and the amount that the learners process at a time."""
    kind = "learner" if recipe.island.tensor == 1 else "island"
    learners = f"{kind} takes" if recipe.num_workers == 1 else f"{kind}s take"
    if states is None or recipe.sequences is None:
        seconds = recipe.batches.max_duration * recipe.batches.accumulate
        return (
            f"{num_tokens} tokens, {batches} mini-batches of up to {seconds:g} s of audio in the first epoch; "
            f"{recipe.num_workers} {learners} {seconds * recipe.num_workers:g} s at a time"
        )
    size = recipe.sequences.batch * recipe.batches.accumulate
    return (
        f"{states.num_states} tied states, {batches} mini-batches of up to {size} sub-sequences of "
        f"{recipe.sequences.frames} frames in an epoch; {recipe.num_workers} {learners} "
        f"{size * recipe.num_workers} at a time"
    )


def set_up_like(recipe: Recipe, before: ExperimentFolder, folder: ExperimentFolder) -> None:
    """Write the files that `set_up` would write to `folder`, reusing those in `before`. The recipe of `before` may
    differ only in its seed or, with `loss: frames`, in its model."""
    initial = Recogniser.load(before.initial)
    recogniser = _untrained(
        recipe, initial.features, initial.tokenizer, initial.states, initial.phones, lambda line: None
    )
    folder.too_short.unlink(missing_ok=True)
    if before.too_short.exists():
        shutil.copyfile(before.too_short, folder.too_short)
    if before.frames.exists():
        shutil.rmtree(folder.frames, ignore_errors=True)
        shutil.copytree(before.frames, folder.frames, copy_function=os.link)  # the files never change
    recogniser.save(folder.initial)


def schedule_change(recipe: Recipe, workload: SpeechWorkload | FrameWorkload) -> str | None:
    """A warning if resuming with this budget changes the learning rate; otherwise None."""
    if recipe.resume is None or (earlier := earlier_recipe(recipe.resume)) is None:
        return None
    before, now = (each.optimizer.schedule.budget or each.budget for each in (earlier, recipe))
    manifest = read_manifest(recipe.resume)
    done = manifest.position.num_done
    epochs = TicketSequence(workload, manifest.position.next_ticket).epochs_before(done)
    progress = Spent(done, epochs, manifest.minutes)
    old, new = (each.optimizer.lr * each.optimizer.schedule.at(progress, each.budget) for each in (earlier, recipe))
    if before == now or math.isclose(old, new):
        return None
    limits = [f"{key}={value}" for key, value in before.model_dump(exclude_none=True).items()]
    keep = " ".join(f"optimizer.schedule.budget.{limit}" for limit in limits)
    return (
        f"warning: the schedule was made for a budget of {', '.join(limits)} and is stretched over this one: the "
        f"learning rate changes from {old:.3g} to {new:.3g} now; to keep the earlier schedule, and its final value "
        f"afterwards, resume with {keep}"
    )


def load_workload(recipe: Recipe, folder: ExperimentFolder) -> SpeechWorkload | FrameWorkload:
    """The workload of a recipe whose `folder` is set up."""
    plan = load_plan(recipe, folder)
    if isinstance(plan, FramePlan):
        return FrameWorkload(plan, folder.initial)
    return SpeechWorkload(plan, folder.initial)


def _leave_out_too_short(
    recipe: Recipe, train: SpeechSets, tokenizer: Tokenizer, features: LogMel, path: Path, say: Say
) -> None:
    """Write to `path` the utterances that cannot be aligned. Raises DataError if there are more of them than the recipe
    allows to skip."""
    path.unlink(missing_ok=True)
    if recipe.loss == "frames":
        whom, what, remedy = "their states", "fewer frames than states", "lower states.per_unit"
        found = too_few_frames(recipe, train, tokenizer, features)
    else:
        speed, subsampling = math.prod(recipe.augment.fastest), recipe.model.subsampling
        whom, what = "CTC", f"too few encoder frames for CTC at speed {speed:g}"
        remedy = f"lower model.subsampling (now {subsampling}), use longer tokens"
        found = too_short_for_ctc(transcripts(train), tokenizer, recipe.model, features, recipe.augment)
    if not found:
        return
    shown = some([f"{each.id} ({each.frames} frames, {each.needed} needed)" for each in found])
    problem = f"{train.name}: {len(found)} of {len(train)} utterances have {what}, such as {shown}"
    if recipe.data.filter.on_bad == "fail":
        raise DataError(
            f"{problem}: {remedy}, raise data.filter.min_seconds, or leave them out with data.filter.on_bad=skip"
        )
    if len(found) > recipe.data.filter.skippable(len(train)):
        allowed = f"data.filter.max_skipped allows {recipe.data.filter.max_skipped:.2%}"
        raise DataError(f"{problem}; {allowed}: {remedy}, or raise that limit")
    write_table(path, TooShort._fields, found)
    listed = recipe.folder / path.name  # the list will be moved there
    say(
        f"{train.name}: {len(found)} of {len(train)} utterances are too short for {whom} and are left out: "
        f"{some([each.id for each in found], 3)}; they are listed in {listed}"
    )


def make_job(recipe: Recipe, folder: ExperimentFolder, learners_here: int | None = None) -> Job:
    """The job of a recipe whose `folder` is set up. `learners_here` is the number of learners on this machine; None in
    a simulation."""
    workload = load_workload(recipe, folder)
    num_workers = recipe.batches.num_workers
    if num_workers == "auto":
        num_workers = 0  # simulations need none, and frames are read from disk without further work
        if learners_here is not None and isinstance(workload, SpeechWorkload):
            epoch = float(workload.plan.utterances.durations.sum(dtype=np.float64))
            num_workers = loading_processes(recipe, learners_here, cores_here(), epoch)
    return job_of(
        recipe,
        workload,
        num_workers=num_workers,
        weighting=recipe.batches.weighting,
        freeze=tuple(each for each in recipe.freeze if each.until is not None),
    )


def loading_processes(recipe: Recipe, learners_here: int, cores: int, epoch: Seconds) -> int:
    """The number of loading processes per learner for `batches.num_workers: auto`. `epoch` is the length of the audio
    of an epoch.

    The number is 0 if there is less than one core per learner, or if a learner loads little audio. A model on the CPU
    needs one process.
    """
    budget, batch = recipe.budget, recipe.batches.max_duration * recipe.batches.accumulate
    limits = [
        None if budget.epochs is None else budget.epochs * epoch,
        None if budget.steps is None else budget.steps * batch,
        None if budget.minutes is None else budget.minutes * 60.0 * AUDIO_PER_SECOND * recipe.num_workers,
    ]
    audio = min(each for each in limits if each is not None) / recipe.num_workers
    if cores < learners_here or audio < MIN_AUDIO_FOR_PROCESSES:
        return 0
    is_slow = recipe.data.remote is not None or (recipe.engine.device != "cpu" and torch.cuda.is_available())
    return max(1, min(MAX_PROCESSES, cores // learners_here - 1)) if is_slow else 1


class ModelWriter:
    """Writes a recogniser with the given weights `[P]` and buffers into a checkpoint.

    The network is created once, before training, because creating it draws from the random generators that training
    uses. Between calls, its parameters occupy no memory.
    """

    def __init__(self, initial: Path, frozen: Sequence[Freeze] = ()) -> None:
        self._recogniser = Recogniser.load(initial)
        freeze(self._recogniser.model, frozen)
        self._parameters = trainable(self._recogniser.model)
        self._buffers = dict(self._recogniser.model.named_buffers())
        num_weights = sum(parameter.numel() for parameter in self._parameters)
        self._empty = torch.zeros(1, dtype=self._parameters[0].dtype).expand(num_weights)
        self._set_weights(self._empty)

    def __call__(self, folder: Path, weights: Tensor, buffers: dict[str, Tensor]) -> None:
        self._set_weights(weights)
        for name, buffer in buffers.items():
            self._buffers[name].copy_(buffer)
        try:
            self._recogniser.save(folder)
        finally:
            self._set_weights(self._empty)

    def _set_weights(self, weights: Tensor) -> None:
        """Make the parameters views of `weights`."""
        for parameter, view in zip(self._parameters, split(weights, self._parameters), strict=True):
            parameter.data = view


_ROW_BLOCKS = {".weight_ih_l": 4, ".weight_hh_l": 4, ".bias_ih_l": 4, ".bias_hh_l": 4, ".attention.inputs.": 3}
"""Number of blocks of rows in a parameter, by a part of its name. The blocks are the gates of an LSTM, or queries, keys
and values."""
_OF_FEATURES = ("subsampling.convolutions.0.weight", "subsampling.projection.weight", "window.weight")
"""Parameters with a column for each feature. If the features differ, no column has the same meaning."""
_LISTED = 6


def warm_start(recogniser: Recogniser, source: Path, sizes: Literal["strict", "partial"] = "strict") -> list[str]:
    """Load the weights of an experiment's newest model, a checkpoint or a recogniser's folder into `recogniser`.
    Returns lines that report which weights were copied.

    The output rows of tokens and phones that both models have are copied, matched by name. With `partial` sizes, a
    parameter whose size differs from its counterpart's receives the part that overlaps, separately for each gate of an
    LSTM and each direction of a bidirectional LSTM. Weights from new units to old units are set to zero, so that added
    units do not change the outputs of old units. Parameters of layers that the source does not have stay unchanged.

    Raises:
        ConfigError: `sizes` is strict and some sizes differ (the message lists them), or no parameter fits.
        CheckpointError: `source` has no model.
    """
    other = load_newest(source)
    transfer = _Transfer(recogniser, other)
    own, theirs = transfer.own, transfer.theirs
    problems = [
        f"{name} is {_shape(own.get(name))} here, {_shape(theirs.get(name))} there"
        for name in sorted(own.keys() | theirs.keys())
        if not name.startswith(OUTPUTS)
        and (name not in own or name not in theirs or own[name].shape != theirs[name].shape)
    ]
    if problems and sizes == "strict":
        raise ConfigError(
            f"warm_start: {source} does not fit this recipe's model: only the outputs may differ, but "
            f"{len(problems)} other tensors do: {'; '.join(problems[:3])}; copy its model: and features: sections, or "
            "take what fits with warm_start.sizes: partial"
        )
    has_other_features = recogniser.features.num_features != other.features.num_features
    for name in own:
        if name.startswith(OUTPUTS):
            continue
        if name not in theirs or (has_other_features and name in _OF_FEATURES and own[name].ndim < 4):
            transfer.new.append(name)
        else:
            transfer.take(name, own[name], theirs[name])
    output = _output(recogniser, other, transfer)
    if recogniser.phones is not None:
        there = other.phones.outputs if other.phones is not None else []
        transfer.take_rows(PHONES, _alike(recogniser.phones.outputs, there))
    if not transfer.num_values:
        raise ConfigError(f"warm_start: no weights of {source} fit this recipe's model; use the same model.name")
    recogniser.model.load_state_dict(own)
    here, rate = recogniser.features.sampling_rate, other.features.sampling_rate
    rates = "" if here == rate else f"; it was trained at {rate} Hz, this recipe has {here} Hz"
    return [
        f"warm start from {source}: {transfer.num_values:,} of {sum(value.numel() for value in own.values()):,} numbers"
        f"{output}{rates}",
        *transfer.in_part_lines(),
    ]


class _Transfer:
    """Copies parameters of another model, and records the names of the parameters that were copied."""

    def __init__(self, recogniser: Recogniser, other: Recogniser) -> None:
        self.own, self.theirs = recogniser.model.state_dict(), other.model.state_dict()
        self.in_part: dict[str, str] = {}
        self.new: list[str] = []
        self.num_values = 0
        self._directions = 2 if all(each.model_config.name.startswith("blstm") for each in (recogniser, other)) else 1

    def take_rows(self, prefix: str, rows: Sequence[tuple[int, int]]) -> None:
        """Copy the paired rows of all parameters whose names start with `prefix`."""
        mine, source = torch.tensor([row for row, _ in rows]), torch.tensor([row for _, row in rows])
        for name in (each for each in self.own if each.startswith(prefix)):
            own = self.own[name]
            if name not in self.theirs or own.shape[1:].numel() == 0 or own.ndim != self.theirs[name].ndim:
                self.new.append(name)
                continue
            value = own[mine]
            self.take(name, value, self.theirs[name][source])
            own[mine] = value

    def take(self, name: str, value: Tensor, given: Tensor) -> None:
        """Copy `given` into `value`. If their sizes differ, copy the part that overlaps, and set weights from new units
        to old units to zero."""
        if value.shape == given.shape:
            value.copy_(given)
            self.num_values += value.numel()
            return
        if value.ndim != given.ndim or value.shape[2:] != given.shape[2:]:
            self.new.append(name)
            return
        rows = next((count for part, count in _ROW_BLOCKS.items() if part in name), 1)
        is_behind_lstm = not name.startswith(("subsampling.", "layers.0."))  # its inputs are both directions' outputs
        columns = self._directions if value.ndim > 1 and ".weight_hh_l" not in name and is_behind_lstm else 1
        mine, theirs = _blocks(value, rows, columns), _blocks(given, rows, columns)
        if mine is None or theirs is None:
            self.new.append(name)
            return
        height, width = min(mine.shape[1], theirs.shape[1]), min(mine.shape[3], theirs.shape[3])
        mine[:, :height, :, width:] = 0
        mine[:, :height, :, :width] = theirs[:, :height, :, :width]
        self.in_part[name] = f"{_shape(given)} of {_shape(value)}"
        self.num_values += mine[:, :height, :, :width].numel()

    def in_part_lines(self) -> list[str]:
        """Lines about the parameters that were not copied unchanged."""
        found = {
            "taken in part": [f"{name} {sizes}" for name, sizes in self.in_part.items()],
            "new": self.new,
            "not used": sorted(self.theirs.keys() - self.own.keys()),
        }
        return [f"{what}: {some(names, _LISTED)}" for what, names in found.items() if names]


def _output(recogniser: Recogniser, other: Recogniser, transfer: _Transfer) -> str:
    """Copy the rows of the output layer that have the same meaning in both models, and return a description."""
    if recogniser.states is not None or other.states is not None:
        if recogniser.states is None or not recogniser.states.means_the_same(other.states):
            states = recogniser.states
            what = f"{recogniser.tokenizer.vocab_size} tokens" if states is None else f"{states.num_states} states"
            return f"; the output layer is new, for {what}"
        rows = [(row, row) for row in range(recogniser.states.num_states)]
        names = []
    else:
        names = recogniser.tokenizer.names
        rows = _alike(names, other.tokenizer.names)
    transfer.take_rows(OUTPUT, rows)
    mine = {row for row, _ in rows}
    new = [repr(name) for row, name in enumerate(names) if row not in mine]
    if not new:
        return ""
    kept = f"in the output layer {len(rows) - 1} of {len(names) - 1} tokens keep their rows"
    return f"; {kept}; new: {some(new, _LISTED)}"


def _alike(names: Sequence[str], there: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of rows (in `names` and in `there`) of the outputs that both models have."""
    places = {name: row for row, name in enumerate(there)}
    return [(row, places[name]) for row, name in enumerate(names) if name in places]


def _blocks(value: Tensor, rows: int, columns: int) -> Tensor | None:
    """A view `[rows, R, columns, C, …]` of a tensor; None if its size is not a multiple of the blocks."""
    matrix = value if value.ndim > 1 else value[:, None]
    if matrix.shape[0] % rows or matrix.shape[1] % columns:
        return None
    return matrix.view(rows, matrix.shape[0] // rows, columns, matrix.shape[1] // columns, *matrix.shape[2:])


def _shape(value: Tensor | None) -> str:
    return "missing" if value is None else str(list(value.shape))
