"""accelerate: `StarlingSGD` in place of its `LocalSGD` trains with any of Starling's strategies."""

from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from starling.engines.loop.joined import JoinedLearner
from starling.errors import ConfigError, ProtocolError
from starling.extras import require
from starling.integrations.host_group import close_host_group, open_host_group
from starling.launch.joining import attach, steps_together

require("huggingface", "starling.integrations.accelerate", ["accelerate"])

from accelerate import Accelerator  # noqa: E402 - after `require`, whose error names the extra


class StarlingSGD:
    """A context in which the prepared optimizer's steps are those of a learner.

    Prepare the model with `accelerator.prepare_model(model, evaluation_mode=True)`, which does not wrap it, and the
    optimizer with `accelerator.prepare(optimizer)`. Under an asynchronous strategy do not prepare the data: give the
    `DataLoader` a `starling.SharedSampler`. At the end the model is the mean of all final weights, the same on all.

    Args:
        accelerator: The accelerator.
        model: The prepared model.
        optimizer: The prepared optimizer.
        strategy: A name that `starling strategies` lists, or a `module:name`.
        enabled: Whether processes train together at all.
        options: The other keywords of `starling.join`, and the strategy's options.

    Raises:
        ConfigError: The model is wrapped, or prepared data would make learners wait for each other.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        strategy: str = "adpsgd",
        *,
        enabled: bool = True,
        **options: Any,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            raise ConfigError(
                "model: accelerate has wrapped it in DistributedDataParallel; prepare it with "
                "accelerator.prepare_model(model, evaluation_mode=True)"
            )
        is_distributed = accelerator.num_processes > 1
        if enabled and is_distributed and accelerator._dataloaders and not steps_together(strategy, options):
            raise ConfigError(
                f"data: a prepared loader communicates in each epoch, which makes learners wait under {strategy}; do "
                "not prepare it, and give its DataLoader a starling.SharedSampler"
            )
        self._accelerator, self._model, self._optimizer = accelerator, model, optimizer
        self._strategy, self._options, self._is_enabled = strategy, options, enabled
        self._is_distributed = is_distributed
        self._learner: JoinedLearner | None = None

    @property
    def learner(self) -> JoinedLearner:
        """The joined learner, for `consensus()` and `stats()`.

        Raises:
            ProtocolError: The context has not been entered.
        """
        if self._learner is None:
            raise ProtocolError("StarlingSGD: there is a learner only once the context has been entered")
        return self._learner

    def step(self) -> None:
        """Do nothing: the optimizer's step is the learner's. It is here for loops with accelerate's `LocalSGD`."""

    def __enter__(self) -> Self:
        if self._is_enabled:
            if self._is_distributed:
                close_host_group()
            optimizer = getattr(self._optimizer, "optimizer", self._optimizer)
            scaler = self._accelerator.scaler
            self._learner = attach(optimizer, self._model, self._strategy, scaler=scaler, **self._options)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._learner is None:
            return
        if error is not None:
            self._learner.__exit__(kind, error, traceback)
            return
        with self._learner.consensus(final=True):
            pass
        self._learner.close()
        if self._is_distributed:  # accelerate's collectives work again
            open_host_group(self._accelerator.state.backend)
