"""`starling.join`: an existing PyTorch training loop becomes one learner among several."""

from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import Any

import torch.distributed as dist
from pydantic import ValidationError
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.optim import Optimizer

from starling.configuration import Config
from starling.engines.loop.joined import JoinedLearner
from starling.engines.loop.replica import check_loop
from starling.engines.processes.place import Place
from starling.errors import ConfigError, did_you_mean
from starling.launch.rendezvous import find_place, is_learner
from starling.strategies import Strategy, find_strategy


def join(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: str | Strategy = "adpsgd",
    *,
    seed: int = 0,
    timeout_seconds: float = 600.0,
    most_not_finite: int = 10,
    **options: Any,
) -> JoinedLearner:
    """Let your own PyTorch loop train `model` together with the other processes that `torchrun` started.

    `strategy` is a name that `starling strategies` lists, a `module:name`, or a `Strategy` of your own; `options` are
    its options, such as `pattern="pairs"`.
    Started as plain `python`, it is the only learner, and the loop gives the same bits as without `join`. The model is
    on its device already, and the optimizer is any of `torch.optim` over the model's parameters; parameter groups,
    learning rate schedulers, gradient clipping and autocast are yours as before. All learners start from learner 0's
    model.

    Learners train the model's parameters that are trainable or in the optimizer now; freeze some of them after joining,
    with `requires_grad_(False)`, and unfreeze them when their time comes. Change the model's dtype, device or layers
    before joining.

    Random patterns are drawn from `seed`. `timeout_seconds` is the longest wait for another learner.
    Gradients that are not finite make no optimizer step; `most_not_finite` of them in a row end the run.

    Raises `ConfigError` for a strategy, options, a model or an optimizer that do not fit, `ProtocolError` when
    learners differ, `PeerLost` when one does not come.
    """
    check_loop(model, optimizer)
    chosen = strategy if isinstance(strategy, Strategy) else find_strategy(strategy)
    checked = _checked(chosen, options)
    if not timeout_seconds > 0.0:
        raise ConfigError(f"timeout_seconds: must be positive, got {timeout_seconds}")
    if most_not_finite < 1:
        raise ConfigError(f"most_not_finite: must be at least 1, got {most_not_finite}")
    if not is_learner():
        place = Place(0, 1, 0, 1, HashStore())
    elif dist.is_initialized():
        raise ConfigError(
            "torch.distributed has a process group already: leave out init_process_group, which starling.join calls "
            "itself (afterwards torch.distributed can be used as usual), or close the learner that joined before"
        )
    else:
        place = _meet(timeout_seconds)
    chosen.validate(checked, place.world)
    return JoinedLearner(place, model, optimizer, chosen, checked, seed, timeout_seconds, most_not_finite)


def _meet(timeout_seconds: float) -> Place:
    """This process's place, with a part of the store for this call of `join`: all learners call it equally often."""
    place = _find_place(timeout_seconds)
    store = PrefixStore(f"join/{next(_JOININGS)}", place.store)
    return Place(place.rank, place.world, place.local_rank, place.local_world, store)


_JOININGS: Iterator[int] = count()
_find_place = cache(find_place)
"""A process connects to the store once: learner 0 may own it, and it must outlive each call of `join`."""


def _checked(strategy: Strategy, options: dict[str, Any]) -> Config:
    """The strategy's options; `ConfigError` lists all problems."""
    try:
        return strategy.options.model_validate(options)
    except ValidationError as error:
        problems = [
            _problem(strategy, ".".join(str(part) for part in detail["loc"]), detail["type"], detail["msg"])
            for detail in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        raise ConfigError("\n".join(problems)) from error


def _problem(strategy: Strategy, name: str, kind: str, message: str) -> str:
    if kind != "extra_forbidden":
        return f"{strategy.name}: {name}: {message.removeprefix('Value error, ')}"
    known = list(strategy.options.model_fields)
    has = ", ".join(known) or "none"
    return f"{strategy.name}: {name!r} is no option of it; {did_you_mean(name, known)}it has {has}"
