"""Hugging Face's `Trainer`: `StarlingTrainer` trains with any of Starling's strategies."""

import math
import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler

from starling.engines.loop.joined import JoinedLearner
from starling.errors import ConfigError, require
from starling.integrations import HostLearner
from starling.launch.joining import steps_together
from starling.launch.rendezvous import number_of_learners
from starling.launch.sharing import SharedSampler

require("huggingface", "starling.integrations.huggingface")

# after `require`, whose error names the extra
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402
from transformers.trainer_pt_utils import find_batch_size  # noqa: E402

_SAMPLER = "SharedSampler"
"""Key of the sampler in the state that the Trainer saves."""
_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


@dataclass
class StarlingArguments(TrainingArguments):  # type: ignore[misc]
    """`TrainingArguments` for `StarlingTrainer`, with the same fields.

    The library `accelerate` sees each process as if it ran alone, so it wraps no model and uses no collectives, which
    would make learners wait for each other. Learner 0 logs and saves.
    """

    def __post_init__(self) -> None:
        with _alone():
            super().__post_init__()
            device = self.device
        if device.type == "cuda":
            device = torch.device("cuda", self.local_process_index % torch.cuda.device_count())
            torch.cuda.set_device(device)
            self.distributed_state.device = device
            self.__dict__["_setup_devices"] = device
            self._n_gpu = 1

    @property
    def process_index(self) -> int:
        """This learner's rank, which changes when learners are lost."""
        return int(self.__dict__.get("_rank", os.environ.get("RANK", "0")))

    @property
    def local_process_index(self) -> int:
        """This learner's rank on its machine."""
        return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))


class StarlingTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` whose processes are learners. It needs `StarlingArguments`.

    Learners join when training starts, after a checkpoint has been loaded. `evaluate` and checkpoints see the mean of
    all learners; after `train` the model is the mean of all final weights. Learner 0 saves.

    Under an asynchronous strategy a `starling.SharedSampler` divides a map-style dataset: an epoch ends when all its
    samples have been given out, and a checkpoint records which ones have. The learning rate follows the share of the
    samples that has been given out, so it is the same for all learners at any speeds. Where learners step together,
    they get equal shares.

    With `options={"on_loss": "continue"}` training survives the loss of any process. If learner 0 is lost, the first
    survivor saves.

    Args:
        args: As in `Trainer`.
        strategy: A name that `starling strategies` lists, or a `module:name`.
        options: The other keywords of `starling.join`, and the strategy's options, such as `{"pattern": "random"}`.
        others: The other arguments of `Trainer`, by name.

    Raises:
        ConfigError: The arguments are not `StarlingArguments`, or ask for what learners cannot do.
    """

    def __init__(
        self, *, args: StarlingArguments, strategy: str = "adpsgd", options: dict[str, Any] | None = None, **others: Any
    ) -> None:
        if not isinstance(args, StarlingArguments):
            raise ConfigError(f"args: {type(args).__name__} lets accelerate wrap the model; use StarlingArguments")
        if args.auto_find_batch_size or args.deepspeed or args.fsdp:
            raise ConfigError("args: auto_find_batch_size, deepspeed and fsdp cannot be used with StarlingTrainer")
        self._host = HostLearner(strategy, dict(options or {}))
        self._world = number_of_learners()
        self._is_in_step = steps_together(strategy, self._host.options)
        self._sampler: SharedSampler | None = None
        self._is_limited = True  # by steps instead of epochs, as far as is known before training
        self._num_epochs = self._num_computed = 0  # `_num_computed`: samples whose step is still to come
        super().__init__(args=args, **others)
        self.callback_handler.callbacks.insert(0, _Follow(self))  # so that others may decide after it

    @property
    def learner(self) -> JoinedLearner | None:
        """The learner of the newest `train`; None before the first. Its `stats()` may be read afterwards."""
        return self._host.learner

    # training

    def train(self, *args: Any, **options: Any) -> Any:
        """Train; see `Trainer.train`. If it fails, the other learners' training ends with `PeerLost`."""
        try:
            return super().train(*args, **options)
        except BaseException as error:
            self._host.leave(error)
            raise

    def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **options)
        self._host.attach(self.optimizer, self.model, self.accelerator.scaler)
        return prepared

    def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Compute a gradient; see `Trainer.training_step`."""
        self._num_computed += find_batch_size(inputs) or 0
        return super().training_step(model, inputs, *args, **options)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        self._host.finish()
        return super()._finalize_training(*args, **options)

    # the consensus

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Evaluate the mean of all learners; each does so alone, on all of the data."""
        with self._host.consensus():
            return dict(super().evaluate(*args, **options))

    def save_model(self, *args: Any, **options: Any) -> None:
        """Save the mean of all learners, on learner 0."""
        if self.args.should_save:
            with self._host.consensus():
                super().save_model(*args, **options)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        if self.args.should_save:
            if self._sampler is not None:
                self.state.stateful_callbacks[_SAMPLER] = self._sampler.state_dict()
            with self._host.consensus():
                super()._save_checkpoint(*args, **options)

    def _init_training_state(self, *args: Any, **options: Any) -> tuple[int, int]:
        epochs_trained, steps_trained = super()._init_training_state(*args, **options)
        if self._sampler is not None and _SAMPLER in self.state.stateful_callbacks:
            given = self.state.stateful_callbacks[_SAMPLER]
            self._sampler.load_state_dict(given)
            epochs_trained, steps_trained = int(given["epoch"]), 0
        self._num_epochs = epochs_trained
        return epochs_trained, steps_trained

    # data and schedule

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        data = self.train_dataset if train_dataset is None else train_dataset
        if self._world == 1 or not hasattr(data, "__len__"):
            return super()._get_train_sampler(train_dataset)
        if self.args.train_sampling_strategy not in ("random", "sequential"):
            raise ConfigError(
                f"args: train_sampling_strategy {self.args.train_sampling_strategy!r} cannot be divided among "
                "learners; use random or sequential"
            )
        is_shuffled = self.args.train_sampling_strategy == "random"
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if not self._is_in_step:
            self._sampler = SharedSampler(len(data), is_shuffled, seed, claim_size=self._train_batch_size)
            return self._sampler
        return _EqualShares(len(data), self._train_batch_size, self.args.process_index, self._world, is_shuffled, seed)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Set the numbers of steps; see `Trainer`. They are those of a learner that gets all data: one may get any
        share of it."""
        self._is_limited = args.max_steps > 0
        if not self._is_shared(dataloader):
            return super().set_initial_training_values(args, dataloader)
        whole = _Sized(dataloader, math.ceil(len(dataloader.dataset) / self._train_batch_size))
        num_epochs, *values = super().set_initial_training_values(args, whole)
        return (sys.maxsize if self._is_limited else num_epochs, *values)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule of a learner of average speed, which follows the samples given out instead of its own steps: a
        slow learner would end with a high rate, and a fast one without any."""
        if self._world == 1 or self._is_in_step or self._is_limited:
            return super().create_scheduler(num_training_steps, optimizer)
        average = math.ceil(num_training_steps / self._world)
        schedule = super().create_scheduler(average, optimizer)
        if isinstance(schedule, LambdaLR):
            shared, per_epoch = self._sampler, average / self.args.num_train_epochs
            schedule.lr_lambdas = [_following(factor, average - 1, shared, per_epoch) for factor in schedule.lr_lambdas]
        return schedule

    def _is_shared(self, dataloader: Any) -> bool:
        return self._world > 1 and not self._is_in_step and hasattr(getattr(dataloader, "dataset", None), "__len__")


class _Follow(TrainerCallback):  # type: ignore[misc]
    """Lets the Trainer follow the progress of the other learners."""

    def __init__(self, trainer: StarlingTrainer) -> None:
        self._trainer, self._num_steps = trainer, 0

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._num_steps = state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Let the first survivor save if learner 0 has been lost. Record that the step's samples were trained on."""
        args.__dict__["_rank"] = self._trainer._host.rank(args.process_index)
        num_done, self._trainer._num_computed = self._trainer._num_computed, 0
        if self._trainer._sampler is not None:
            self._trainer._sampler.done(num_done)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End the epoch for all learners, however many of its samples this one got: perhaps none."""
        if self._trainer._sampler is None:
            return
        if state.global_step == self._num_steps:
            control.should_training_stop = False
        if not control.should_training_stop:
            self._trainer._num_epochs += 1
            state.epoch = float(self._trainer._num_epochs)


class _EqualShares(Sampler[int]):
    """A sampler that deals out batches in turn, as accelerate does; the last batches begin again from the first."""

    def __init__(self, num: int, batch_size: int, rank: int, world: int, is_shuffled: bool, seed: int) -> None:
        self._num, self._batch_size, self._rank, self._world = num, batch_size, rank, world
        self._is_shuffled, self._seed, self._epoch = is_shuffled, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self._num / (self._batch_size * self._world)) * self._batch_size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order = torch.randperm(self._num, generator=generator) if self._is_shuffled else torch.arange(self._num)
        self._epoch += 1
        for place in range(len(self)):
            row, column = divmod(place, self._batch_size)
            yield int(order[((row * self._world + self._rank) * self._batch_size + column) % self._num])


class _Sized:
    """A loader with a length."""

    def __init__(self, loader: Any, length: int) -> None:
        self.dataset, self.batch_size, self._length = loader.dataset, getattr(loader, "batch_size", None), length

    def __len__(self) -> int:
        return self._length


def _following(
    factor: Callable[[int], float], last: int, sampler: SharedSampler | None, per_epoch: float
) -> Callable[[int], float]:
    """A function that returns the factor of the learning rate. With a `sampler`, it replaces the given step by the step
    that corresponds to the samples given out. No step is later than `last`. It is a function, because schedules save
    other callables."""

    def at(step: int) -> float:
        return factor(min(step if sampler is None else int(sampler.progress * per_epoch), last))

    return at


@contextmanager
def _alone() -> Generator[None, None, None]:
    """A context in which the environment is that of a process that was started alone."""
    hidden = {name: os.environ.pop(name) for name in _PLACE if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
