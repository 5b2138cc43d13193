"""`starling.join`: turns an existing PyTorch training loop into one learner of several.

The module also checks the loop for parts that learners cannot train together, for leftovers of DistributedDataParallel,
and for anything else that would harm learners."""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data.distributed import DistributedSampler

from starling.configuration import Config, checked, owners
from starling.engines.loop.joined import JoinedLearner
from starling.engines.loop.replica import OptimizerList, as_one, members_of, parameters_of
from starling.engines.loop.run import LoopCheckpoints, LoopFiles, LoopRecord, Stateful
from starling.engines.processes.handshake import Peers
from starling.engines.processes.place import Place
from starling.errors import ConfigError
from starling.launch.rendezvous import find_place, is_learner, number_of_learners
from starling.strategies import Strategy, find_strategy
from starling.timeouts import CONNECT
from starling.training.flat import trainable
from starling.training.membership import Membership
from starling.training.order import RACES

if TYPE_CHECKING:
    from starling.launch.coordinator import CoordinatorFeed


def join(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: str | Strategy = "adpsgd",
    *,
    seed: int = 0,
    timeout_seconds: float = 600.0,
    most_not_finite: int = 10,
    on_loss: Literal["stop", "continue"] = "stop",
    record: Path | str | None = None,
    follow: Path | str | None = None,
    checkpoints: Path | str | None = None,
    stateful: Sequence[Stateful] = (),
    **options: Any,
) -> JoinedLearner:
    """Let your own PyTorch loop train `model` together with the other processes that `torchrun` started.

    Under plain `python` there is one learner, and the loop's results are bit-identical to those without `join`. All
    learners start from learner 0's model. Parameter groups, learning rate schedulers, gradient clipping and autocast
    work as usual.

    Learners train the parameters that are trainable or in the optimizer when `join` is called. You may freeze and
    unfreeze these parameters later with `requires_grad_`.

    Args:
        model: The model, on its device. Change its dtype, device or layers before joining.
        optimizer: Any optimizer of `torch.optim` except LBFGS, over the model's parameters. If the loop has several
            optimizers with separate parameters, such as Muon and AdamW or the two optimizers of a GAN, pass a list.
        strategy: A name that `starling strategies` lists, a `module:name`, or a `Strategy`.
        seed: The seed of random communication patterns.
        timeout_seconds: The longest time to wait for another learner.
        most_not_finite: The number of successive non-finite gradients after which the run ends. Until then, such
            gradients are skipped.
        on_loss: What the other learners do when a learner is lost. With `stop`, they raise an error that names the lost
            learner. With `continue`, they continue without it; a restarted process, or a new process with its own RANK,
            can then join the run.
        record: A folder in which the learners record the order of their events. The record of an earlier run in this
            folder is replaced.
        follow: A folder that contains such a record. The learners follow the recorded order, so that a loop that
            computes the same gradients ends with bit-identical weights.
        checkpoints: A folder, which all learners share, for the checkpoints that `JoinedLearner.save` writes. If it
            contains a checkpoint, the run resumes from the newest one, also with another number of learners.
        stateful: Objects with `state_dict` and `load_state_dict` that are saved and resumed with the learner, such as
            learning rate schedulers, a `GradScaler` and samplers.
        options: The strategy's options, such as `pattern="pairs"`.

    Raises:
        ConfigError: The strategy, its options, the model or the optimizer cannot be used.
        ProtocolError: Learners differ in configuration, model or version.
        PeerLost: Another learner did not connect in time.
        CheckpointError: The newest checkpoint is damaged, or holds another model.
        ReplayError: The record to `follow` is damaged, or the learners end with weights that differ from the record.
    """
    check_loop(model, joined := as_one(optimizer))
    chosen = strategy if isinstance(strategy, Strategy) else find_strategy(strategy)
    own = checked(chosen.options, options, chosen.name)
    _check(joined, chosen, own, on_loss)
    if not timeout_seconds > 0.0:
        raise ConfigError(f"timeout_seconds: must be positive, got {timeout_seconds}")
    if most_not_finite < 1:
        raise ConfigError(f"most_not_finite: must be at least 1, got {most_not_finite}")
    if is_learner() and dist.is_initialized():
        raise ConfigError(
            "torch.distributed already has a process group: remove your call of init_process_group, because "
            "starling.join calls it (torch.distributed can be used afterwards), or close the learner that joined before"
        )
    if is_learner() and on_loss == "continue":
        chosen.validate(own, number_of_learners())
        size = chosen.size_of_unit(own)
        if size > 1 and _prepared:
            raise ConfigError(
                f"on_loss: {chosen.name} cannot continue here without some of its learners, because the adapter "
                'connects before it knows their super-learners; choose another strategy, such as adpsgd, or "stop"'
            )
        feed = _prepared.pop() if _prepared else _connected(timeout_seconds, size)
        place = feed.place
        _surviving[:] = [feed]
        root = Peers(place, timeout_seconds, feed=feed)
    else:
        place = shared_place(timeout_seconds)  # the number of earlier calls is the same on all learners
        root = Peers(replace(place, store=PrefixStore(f"join/{next(_NUM_CALLS)}", place.store)), timeout_seconds)
        _surviving.clear()
    chosen.validate(own, place.world)
    is_in_step = chosen.sync_groups(own, place.world).size == place.world
    check_modules(model, chosen.name, is_in_step)
    files = LoopFiles()
    if checkpoints is not None:
        files = LoopFiles(checkpoints=LoopCheckpoints(Path(checkpoints), stateful))
    elif stateful:
        raise ConfigError("stateful: these objects are saved in checkpoints; give a folder as `checkpoints`")
    if record is not None or follow is not None:
        if chosen.name in RACES:
            raise ConfigError(f"record, follow: learners of {chosen.name} race for single numbers, in no order")
        if checkpoints is not None:
            raise ConfigError("record, follow: a run that saves checkpoints cannot be recorded; leave one of them out")
        files = LoopFiles(LoopRecord(place.rank, *(None if each is None else Path(each) for each in (record, follow))))
    return JoinedLearner(root, model, joined, chosen, own, seed, most_not_finite, files)


def _check(optimizer: Optimizer, strategy: Strategy, options: Config, on_loss: str) -> None:
    """Raise `ConfigError` for arguments of `join` that do not suit the strategy. For example, servers cannot make the
    steps of some optimizers, and some optimizers cannot step in shared memory."""
    for member in members_of(optimizer) if strategy.is_served or not strategy.steps_itself else ():
        kind = type(member).__name__
        if callable(getattr(member, "train", None)) and callable(getattr(member, "eval", None)):
            raise ConfigError(
                f"optimizer: {kind} has weights to train and weights to evaluate, between which train() and eval() "
                f"switch, but under {strategy.name} it makes its steps elsewhere; choose a strategy whose learners "
                "step themselves, such as adpsgd, or another optimizer"
            )
        if isinstance(member, torch.optim.SparseAdam):
            raise ConfigError(
                f"optimizer: {kind} needs sparse gradients, and under {strategy.name} they travel as whole vectors; "
                "choose Adam, or a strategy whose learners step themselves, such as adpsgd"
            )
    if isinstance(optimizer, OptimizerList) and getattr(options, "optimizer_state", "local") == "averaged":
        raise ConfigError(
            "optimizer_state: several optimizers have no common state to average; leave it out, or join with one"
        )
    if on_loss not in ("stop", "continue"):
        raise ConfigError(f"on_loss: must be 'stop' or 'continue', got {on_loss!r}")


def attach(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    strategy: str | Strategy = "adpsgd",
    *,
    scaler: GradScaler | None = None,
    **options: Any,
) -> JoinedLearner:
    """Join a loop whose code cannot be changed. Each call of `optimizer.step()` in the loop becomes a learner's step.

    Call `attach` once, after creating the optimizer and before its first step. The results are bit-identical to those
    of `JoinedLearner.step`. A step with a closure works, too. A process that ends without an error closes its learner.
    If the loop saves the model, it saves this learner's own weights. To save the mean of all learners' weights, save
    within `consensus()` of the returned learner.

    The optimizer's other hooks act once for each step. Hooks that were registered before `attach` see this learner's
    own gradient.

    Args:
        optimizer: The loop's optimizer, or a list of its optimizers. With a list, each call of an optimizer's `step` is
            a step of the learner with that optimizer alone.
        model: The model that the optimizer trains.
        strategy: The strategy, as in `starling.join`.
        scaler: The loop's `GradScaler`. Its `step` becomes a learner's step as well. If you omit a scaler that the loop
            uses, a step that the scaler skips is not a step of the learner, and learners of a synchronous strategy
            then make unequal numbers of steps and fail.
        options: The other keyword arguments of `starling.join`, and the strategy's options.

    Raises:
        ConfigError: The cause is one that `starling.join` lists.
        ProtocolError: The cause is one that `starling.join` lists.
        PeerLost: The cause is one that `starling.join` lists.
    """
    learner = join(model, optimizer, strategy, **options)
    learner.take_over(scaler)
    return learner


def steps_together(strategy: str, options: dict[str, Any]) -> bool:
    """Return whether all processes would make their steps together under a strategy if they joined now.

    `options` are the keyword arguments of `join`."""
    chosen = find_strategy(strategy)
    own = {name: value for name, value in options.items() if name in owners(chosen.options)}
    world = number_of_learners()
    return chosen.sync_groups(checked(chosen.options, own, chosen.name), world).size == world


def shared_place(timeout_seconds: float = CONNECT) -> Place:
    """Return this process's place, which includes the store that all calls of `join` share. A process connects to the
    store only once, because learner 0 may own it. A lone learner has its own store."""
    if not is_learner():
        return _ALONE
    if not _places:
        _places.append(find_place(timeout_seconds))
    return _places[0]


def prepare_to_survive(timeout_seconds: float = CONNECT) -> None:
    """Connect to the coordinator before `join(…, on_loss="continue")` is called. Samplers that are used before `join`
    then share the coordinator's store, which outlives every learner."""
    _prepared[:] = [_connected(timeout_seconds)]
    _surviving[:] = _prepared


def newest_place() -> Place:
    """Return this process's place in the newest run. If the run survives lost learners, the place has the coordinator's
    store."""
    return _surviving[0].place if _surviving else shared_place()


def newest_membership() -> Membership | None:
    """Return the newest membership of a run that survives lost learners; None before it begins, and in other runs."""
    return _surviving[0].latest if _surviving and _surviving[0].latest.members else None


def _connected(timeout_seconds: float, size_of_unit: int = 1) -> "CoordinatorFeed":
    # only loops that survive losses need it, and the launcher's messages
    from starling.launch.coordinator import connect

    return connect(timeout_seconds, _places[0].store if _places else None, size_of_unit)


_ALONE = Place(0, 1, 0, 1, HashStore())
_NUM_CALLS: Iterator[int] = count()
_places: list[Place] = []
_surviving: "list[CoordinatorFeed]" = []
_prepared: "list[CoordinatorFeed]" = []


def check_loop(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise `ConfigError` for a model or optimizer that learners cannot train together."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                f"model: {name or 'it'} is a DistributedDataParallel, which averages gradients; use its `.module`"
            )
    parameters = trainable(model)
    if parameters[0].is_complex():
        name = next(name for name, each in model.named_parameters() if each is parameters[0])
        raise ConfigError(
            f"model: parameter {name} is {parameters[0].dtype}, and learners exchange real numbers; keep it as a real "
            "parameter with a last dimension of 2, and use torch.view_as_complex of it in forward"
        )
    if len(devices := {str(parameter.device) for parameter in parameters}) > 1:
        raise ConfigError(f"model: its parameters must be on one device, found {', '.join(sorted(devices))}")
    own = {id(parameter) for parameter in model.parameters()}
    known = list(parameters_of(optimizer))
    if foreign := [parameter for parameter in known if id(parameter) not in own]:
        raise ConfigError(
            f"optimizer: {len(foreign)} of its {len(known)} parameters do not belong to the model; the first has shape "
            f"{list(foreign[0].shape)}. Create it from `model.parameters()`; join several models as one "
            "`nn.ModuleList`, with a list of their optimizers"
        )
    if not {id(parameter) for parameter in known} & {id(parameter) for parameter in parameters}:
        raise ConfigError("optimizer: it has none of the model's trainable parameters")
    for member in members_of(optimizer):
        closure = inspect.signature(member.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"optimizer: {type(member).__name__} needs a closure to compute several gradients per step, but a "
                "learner computes one gradient per step; use an optimizer without a closure, such as SGD or AdamW"
            )


def check_modules(model: nn.Module, strategy: str, is_in_step: bool) -> None:
    """Raise `ConfigError` for modules that communicate between processes if learners do not step together. Warn of
    metrics that communicate when they are computed."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and not is_in_step:
            raise ConfigError(
                f"model: {name or 'it'} is a SyncBatchNorm, which waits for all learners in each forward pass; under "
                f"{strategy} they are not in step: use BatchNorm (`consensus` averages its statistics), or allreduce"
            )
    metrics = [name for name, module in model.named_modules() if getattr(module, "sync_on_compute", False) is True]
    if metrics and not is_in_step:
        warnings.warn(
            f"model: {', '.join(metrics[:5])}: torchmetrics exchange their states in compute(), which makes learners "
            f"wait for each other under {strategy}; create them with sync_on_compute=False",
            RuntimeWarning,
            stacklevel=3,
        )


def check_samplers(loaders: Iterable[object], strategy: str, is_in_step: bool) -> None:
    """Raise `ConfigError` for a sampler of Starling if learners step together, because they would take different
    numbers of steps. If they do not, warn of a `DistributedSampler`, which gives a slow learner as much work as a fast
    one."""
    for loader in loaders:
        samplers = [getattr(each, "sampler", None) for each in (loader, getattr(loader, "batch_sampler", None))]
        if is_in_step and any(getattr(sampler, "is_shared", False) for sampler in samplers):
            raise ConfigError(
                f"data: a SharedSampler gives learners different numbers of batches, but under {strategy} all learners "
                "step together, so they would wait for each other without end; use a DistributedSampler, or adpsgd"
            )
        if not is_in_step and any(isinstance(sampler, DistributedSampler) for sampler in samplers):
            warnings.warn(
                f"the data has a DistributedSampler: it gives all learners equal shares, so that under {strategy} the "
                "fast ones end first; use starling.SharedSampler, whose samples go to the learner that asks first",
                RuntimeWarning,
                stacklevel=3,
            )
            return
