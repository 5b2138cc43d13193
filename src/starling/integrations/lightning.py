"""Lightning: `Trainer(strategy=StarlingStrategy("adpsgd"))` trains with any of Starling's strategies."""

import json
import os
import signal
import warnings
from contextlib import ExitStack
from itertools import count
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_leaves

from starling.engines.loop.joined import JoinedLearner
from starling.errors import ConfigError, ProtocolError, require
from starling.integrations import HostLearner, close_host_group, open_host_group
from starling.launch.joining import check_samplers, newest_place, prepare_to_survive
from starling.launch.rendezvous import is_learner
from starling.timeouts import CONNECT

require("lightning", "starling.integrations.lightning")

from lightning.fabric.utilities.seed import reset_seed  # noqa: E402 - after `require`, whose error names the extra
from lightning.pytorch import Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402
from lightning.pytorch.utilities.exceptions import SIGTERMException  # noqa: E402

T = TypeVar("T")
_NUM_FITS = count()


class StarlingStrategy(DDPStrategy):  # type: ignore[misc]
    """A Lightning strategy under which each process is a learner.

    It is a `DDPStrategy` as far as processes, devices and precision are concerned, but does not wrap the model: each
    optimizer step of the trainer is a step of the learner. Learners join when training starts, after a checkpoint has
    been restored. Validation within `fit`, and checkpoints, see the mean of all learners; after `fit` the model is the
    mean of all final weights, the same on all of them.

    While learners that are not in step train, Lightning's collectives are local: `sync_dist=True` logs each learner's
    own value, and a learner that stops early leaves the others training. Under `allreduce` they are those of DDP. With
    `on_loss="continue"` they are local under every strategy, and after a loss they stay so.

    Args:
        strategy: A name that `starling strategies` lists, or a `module:name`.
        accelerator: As in `DDPStrategy`, like the next six.
        parallel_devices: The devices of this machine.
        cluster_environment: Where processes find each other.
        checkpoint_io: Writes checkpoints.
        precision_plugin: The precision; usually `Trainer(precision=...)`.
        process_group_backend: What connects processes before they join.
        start_method: How the trainer starts processes, if nothing else does.
        options: The other keywords of `starling.join`, and the strategy's options, such as `pattern="random"`.
    """

    def __init__(
        self,
        strategy: str = "adpsgd",
        *,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        start_method: Any = "popen",
        **options: Any,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            start_method=start_method,
        )
        self._host = HostLearner(strategy, options)
        self._evaluation = ExitStack()

    @property
    def learner(self) -> JoinedLearner | None:
        """The learner of the newest `fit`; None before the first. Its `stats()` may be read afterwards."""
        return self._host.learner

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes checkpoints: learner 0, or the first survivor once learner 0 is lost."""
        return self._host.rank(self.global_rank) == 0

    # processes and model

    def setup_distributed(self) -> None:
        """Connect the processes, which prepare together as under DDP."""
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        environment = self.cluster_environment
        if self.world_size > 1:
            os.environ.update(
                MASTER_ADDR=str(environment.main_address),
                MASTER_PORT=str(environment.main_port),
                RANK=str(self.global_rank),
                WORLD_SIZE=str(self.world_size),
                LOCAL_RANK=str(self.local_rank),
                LOCAL_WORLD_SIZE=str(self.num_processes),
            )
            open_host_group(self._process_group_backend, self._timeout, self._host.has_lost)

    def setup(self, trainer: Trainer) -> None:
        """Prepare to train, or to evaluate. Before learners join, Lightning asks a loader without a length for data."""
        if self._host.survives and trainer.state.fn == TrainerFn.FITTING and is_learner():
            prepare_to_survive(self._host.options.get("timeout_seconds", CONNECT))
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Leave the model as it is."""

    # training

    def on_train_start(self) -> None:
        """Join the other learners. Checkpoints have been restored by now."""
        super().on_train_start()
        if len(self.optimizers) != 1:
            raise ConfigError(
                f"configure_optimizers: returns {len(self.optimizers)} optimizers, but this strategy takes one; use "
                "parameter groups of one optimizer"
            )
        close_host_group()
        scaler = getattr(self.precision_plugin, "scaler", None)
        module = self.lightning_module
        learner = self._host.attach(self.optimizers[0], module, scaler)
        loaders, is_in_step = tree_leaves(module.trainer.train_dataloader), learner.is_in_step
        check_samplers(loaders, self._host.strategy, is_in_step and learner.world > 1)
        if self._host.is_apart:
            _terminate_alone(module.trainer)

    def on_train_end(self) -> None:
        """Adopt the mean of all final weights, and leave once all learners have."""
        super().on_train_end()
        self._host.finish()
        if not self._host.survives:  # otherwise the store may be gone
            self._share_paths()

    def _share_paths(self) -> None:
        """Give the checkpoint callbacks of all learners the paths that learner 0 wrote, so that `ckpt_path="best"` is
        the same model everywhere. Their own paths count their own steps, and nothing was written there."""
        store, key = newest_place().store, f"paths/{next(_NUM_FITS)}"
        callbacks = self.lightning_module.trainer.checkpoint_callbacks
        if self.is_global_zero:
            store.set(key, json.dumps([getattr(each, "best_model_path", None) for each in callbacks]))
        for callback, path in zip(callbacks, json.loads(store.get(key)), strict=True):
            if path is not None:
                callback.best_model_path = path

    def on_exception(self, exception: BaseException) -> None:
        """Notify the others, whose training ends with `PeerLost`."""
        self._host.leave(exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Leave if training has not ended, and release the devices."""
        self._host.leave(ProtocolError("the trainer was torn down before its training had ended"))
        super().teardown()

    # the consensus

    def on_validation_start(self) -> None:
        """Load the mean of all learners' models."""
        super().on_validation_start()
        self._evaluation = ExitStack()
        self._evaluation.enter_context(self._host.consensus())

    def on_validation_end(self) -> None:
        """Return to this learner's own model."""
        super().on_validation_end()
        self._evaluation.close()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights to save: the mean of all learners' models. Only learner 0's are written."""
        if not self.is_global_zero:
            return dict(super().lightning_module_state_dict())
        with self._host.consensus():
            state = super().lightning_module_state_dict()
            return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    # collectives, which are local while learners are apart

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all learners, if they are in step."""
        if not self._host.is_apart:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of learner `src` if learners are in step, otherwise this learner's own."""
        if self._host.is_apart:
            return obj
        result: T = super().broadcast(obj, src)
        return result

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean or sum over learners if they are in step, otherwise this learner's own value, with a
        RuntimeWarning."""
        if not self._host.is_apart:
            return super().reduce(tensor, group, reduce_op)
        warnings.warn(
            "sync_dist=True and strategy.reduce() would make learners wait for each other under "
            f"{self._host.strategy}; each logs its own value instead: leave sync_dist out",
            RuntimeWarning,
            stacklevel=2,
        )
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - as in Lightning
        """The common decision if learners are in step, otherwise this learner's own."""
        return decision if self._host.is_apart else bool(super().reduce_boolean_decision(decision, all))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather tensors of learners that are in step.

        Raises:
            ConfigError: Learners are not in step.
        """
        if self._host.is_apart:
            raise ConfigError(
                f"all_gather() waits for all learners, which are not in step under {self._host.strategy}; compute "
                "metrics from this learner's own results, or evaluate after fit()"
            )
        gathered: Tensor = super().all_gather(tensor, group, sync_grads)
        return gathered


def _terminate_alone(trainer: Trainer) -> None:
    """Let SIGTERM end this process's training. Lightning broadcasts learner 0's signal to all, before each batch."""

    def check() -> None:
        if trainer.received_sigterm:
            raise SIGTERMException

    def notify(number: int, frame: object) -> None:
        if trainer.strategy.launcher is not None and not trainer.received_sigterm:
            trainer.strategy.launcher.kill(number)
        trainer._signal_connector.received_sigterm = True

    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = check
    handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", None)
    if handlers:
        handlers[0] = notify
