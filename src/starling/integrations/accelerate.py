"""accelerate: `StarlingSGD` in place of its `LocalSGD` trains with any of Starling's strategies."""

from typing import Any, Self

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from starling.engines.loop.joined import JoinedLearner
from starling.errors import ConfigError, ProtocolError, require
from starling.integrations import HostLearner, close_host_group, open_host_group
from starling.launch.joining import shared_place, steps_together

require("huggingface", "starling.integrations.accelerate", ["accelerate"])

from accelerate import Accelerator  # noqa: E402 - after `require`, whose error names the extra
from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402


class StarlingSGD:
    """A context in which the prepared optimizer's steps are those of a learner.

    Prepare the model with `accelerator.prepare_model(model, evaluation_mode=True)`, which does not wrap it, and the
    optimizer with `accelerator.prepare(optimizer)`. Under an asynchronous strategy do not prepare the data: give the
    `DataLoader` a `starling.SharedSampler`. At the end the model is the mean of all final weights, the same on all.

    Within the context accelerate's collectives are local (`gather` returns this process's own values), unless learners
    step together. With `on_loss="continue"` they are local under every strategy, and after a loss they stay so.

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
        self._host, self._is_enabled, self._is_distributed = HostLearner(strategy, options), enabled, is_distributed
        self._kind = accelerator.distributed_type

    @property
    def learner(self) -> JoinedLearner:
        """The joined learner, for `consensus()` and `stats()`.

        Raises:
            ProtocolError: The context has not been entered, or `enabled` is False.
        """
        if self._host.learner is None:
            raise ProtocolError("StarlingSGD: there is a learner only in the context, and with enabled=True")
        return self._host.learner

    def step(self) -> None:
        """Make the first survivor accelerate's main process if learner 0 has been lost. Call this method after
        `optimizer.step()`, which makes the learner's step, as with `LocalSGD`."""
        if self._host.has_lost:
            self._set(process_index=self.learner.rank)

    def __enter__(self) -> Self:
        if self._is_enabled:
            if self._is_distributed:
                shared_place()  # at the store of accelerate's group, which ends with that group
                close_host_group()
            self._host.attach(self._optimizer, self._model, self._accelerator.scaler)
            if _give_copies not in self._model._state_dict_hooks.values():
                self._model.register_state_dict_post_hook(_give_copies)  # type: ignore[no-untyped-call]
            if self._host.is_apart:
                self._set(distributed_type=DistributedType.NO)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._host.leave(error)
            return
        if not self._is_enabled:
            return
        self._host.finish()
        if self._host.has_lost:
            self._set(process_index=self.learner.rank, num_processes=self.learner.world)
            return
        self._set(distributed_type=self._kind)  # accelerate's collectives work again
        if self._is_distributed:
            open_host_group(self._accelerator.state.backend)

    def _set(self, **state: Any) -> None:
        """Change accelerate's record of its processes."""
        for shared in (PartialState(), AcceleratorState()):
            for name, value in state.items():
                setattr(shared, name, value)


def _give_copies(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Let `state_dict` return separate tensors. A learner's weights are views of one tensor; of tensors that share
    memory, accelerate saves only one."""
    copies: dict[object, Tensor] = {}  # tied weights stay tied
    for name, value in state.items():
        if isinstance(value, Tensor) and not value.requires_grad:
            place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            state[name] = copies[place] if place in copies else copies.setdefault(place, value.clone())
