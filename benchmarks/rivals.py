"""The columns of the table of peers: each one's training loop, ours and theirs, behind a common interface.

Each column is a context in which a worker has a `Loop`. Each library is imported where it is used: only `make
bench-peers` installs the rivals, and no column's time includes the import of another's library.
"""

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from benchmarks.tuned_ddp import BUCKET_MEGABYTES, tuned_ddp

TIMEOUT = timedelta(seconds=60)
LEARNING_RATE, MOMENTUM = 0.05, 0.9
LOCAL_STEPS = 10
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""Learning rate and momentum of DiLoCo's outer optimizer."""


@dataclass(frozen=True)
class Loop:
    """The calls of a training loop, in this order: `zero_grad`, `model`, `backward` of the loss, `step`."""

    model: Callable[[Tensor], Tensor]
    zero_grad: Callable[[], None]
    step: Callable[[], None]
    num_rounds: Callable[[], int] | None = None
    """A function that returns the number of exchanges so far, if it is not a constant share of the steps."""


@dataclass(frozen=True)
class Worker:
    """A worker's place in one case, and what it trains."""

    rank: int
    world: int
    store: Store
    """A store for this case alone."""
    model: nn.Module
    options: dict[str, Any]
    """Options of the column, in place of its usual ones."""


Open = Callable[[Worker], AbstractContextManager[Loop]]


@dataclass(frozen=True)
class Column:
    """A library's training under one strategy."""

    title: str
    open: Open
    in_step: bool = True
    """Whether all workers must make equal numbers of steps."""
    rounds_per_gradient: float | None = None
    """Rounds per gradient, if constant. None means that they are measured if `in_step=False`; otherwise, nothing is
    averaged."""
    averages: bool = True


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every column."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


@contextmanager
def alone(worker: Worker) -> Generator[Loop, None, None]:
    """A plain loop without other workers."""
    optimizer = sgd(list(worker.model.parameters()))
    yield Loop(worker.model, optimizer.zero_grad, optimizer.step)


@contextmanager
def ddp(worker: Worker) -> Generator[Loop, None, None]:
    """Tuned plain DistributedDataParallel."""
    with _default_group(worker):
        reducing = tuned_ddp(worker.model, **worker.options)
        optimizer = sgd(list(worker.model.parameters()))
        yield Loop(reducing, optimizer.zero_grad, optimizer.step)


def ours(strategy: str, **usual: Any) -> Open:
    """Starling's drop-in under `strategy`."""

    @contextmanager
    def open_it(worker: Worker) -> Generator[Loop, None, None]:
        import starling

        optimizer = sgd(list(worker.model.parameters()))
        options = {**usual, **worker.options}
        with starling.join(worker.model, optimizer, strategy, timeout_seconds=60.0, **options) as learner:
            yield Loop(worker.model, optimizer.zero_grad, learner.step, lambda: learner.stats().rounds)

    return open_it


@contextmanager
def decent_dp(worker: Worker) -> Generator[Loop, None, None]:
    """Decent-DP: steps and averages bucket by bucket after backward, with one neighbour of a ring at a time."""
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.remove()
    os.environ["LOCAL_WORLD_SIZE"] = str(worker.world)

    def nothing() -> None: ...

    with _default_group(worker):
        averaging = DecentralizedDataParallel(
            worker.model,
            optim_fn=lambda named: sgd([parameter for _, parameter in named]),
            **{"topology": "ring", "bucket_size_in_mb": BUCKET_MEGABYTES, **worker.options},
        )
        yield Loop(averaging, nothing, nothing)  # it steps and zeroes gradients itself, behind backward


@contextmanager
def torchft_ddp(worker: Worker) -> Generator[Loop, None, None]:
    """torchft's fault-tolerant DDP: each worker is a replica group."""
    import torchft

    optimizer = sgd(list(worker.model.parameters()))
    with _torchft_manager(worker, optimizer, use_async_quorum=True) as manager:
        tuning = {"gradient_as_bucket_view": True, "bucket_cap_mb": BUCKET_MEGABYTES}
        reducing = torchft.DistributedDataParallel(manager, worker.model, **{**tuning, **worker.options})
        managed = torchft.Optimizer(manager, optimizer)
        yield Loop(reducing, managed.zero_grad, managed.step)


@contextmanager
def torchft_local_sgd(worker: Worker) -> Generator[Loop, None, None]:
    """torchft's LocalSGD: weights are averaged after every tenth step."""
    from torchft.local_sgd import LocalSGD

    optimizer = sgd(list(worker.model.parameters()))
    with (
        _torchft_manager(worker, optimizer, use_async_quorum=False) as manager,
        LocalSGD(manager, worker.model, optimizer, sync_every=LOCAL_STEPS),
    ):
        yield Loop(worker.model, optimizer.zero_grad, optimizer.step)


@contextmanager
def torchft_diloco(worker: Worker) -> Generator[Loop, None, None]:
    """torchft's DiLoCo: after every tenth step, an outer Nesterov optimizer takes the mean pseudo-gradient."""
    from torchft.local_sgd import DiLoCo

    optimizer = sgd(list(worker.model.parameters()))
    outer = torch.optim.SGD(worker.model.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    with (
        _torchft_manager(worker, optimizer, use_async_quorum=False) as manager,
        DiLoCo(manager, [worker.model], optimizer, outer, sync_every=LOCAL_STEPS, **worker.options),
    ):
        yield Loop(worker.model, optimizer.zero_grad, optimizer.step)


@contextmanager
def _default_group(worker: Worker) -> Generator[None, None, None]:
    dist.init_process_group("gloo", store=worker.store, rank=worker.rank, world_size=worker.world, timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _torchft_manager(worker: Worker, optimizer: torch.optim.Optimizer, **options: Any) -> Generator[Any, None, None]:
    import torchft
    from torchft.coordination import LighthouseServer

    def load(state: dict[str, Any]) -> None:
        worker.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    lighthouse = None
    if worker.rank == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=worker.world, quorum_tick_ms=10)
        worker.store.set("lighthouse", lighthouse.address())
    own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = torchft.ProcessGroupGloo(timeout=TIMEOUT)
    manager = torchft.Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {"model": worker.model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=worker.world,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=own.port,
        lighthouse_addr=worker.store.get("lighthouse").decode(),
        replica_id=str(worker.rank),
        hostname="127.0.0.1",
        init_sync=False,  # models begin equal; else the first exchange would throw away what all but one have learned
        **options,
    )
    try:
        yield manager
    finally:
        if worker.store.add("over", 1) == worker.world:
            worker.store.set("all over", "")
        worker.store.wait(["all over"], TIMEOUT)  # who left earlier would look lost to the others
        manager.shutdown(wait=False)
        group.abort()
        if lighthouse is not None:
            lighthouse.shutdown()


COLUMNS = {
    "alone": Column("alone", alone, in_step=False, averages=False),
    "ddp": Column("DDP", ddp, rounds_per_gradient=1.0),
    "allreduce": Column("allreduce", ours("allreduce"), rounds_per_gradient=1.0),
    "dpsgd": Column("dpsgd ring", ours("dpsgd", pattern="ring"), rounds_per_gradient=1.0),
    "dpsgd_pairs": Column("dpsgd pairs", ours("dpsgd", pattern="pairs"), rounds_per_gradient=1.0),
    "delay_by_one": Column("delay-by-one", ours("delay-by-one"), rounds_per_gradient=1.0),
    "local_sgd": Column("local-sgd", ours("local-sgd", every=LOCAL_STEPS), rounds_per_gradient=1.0 / LOCAL_STEPS),
    "diloco": Column(
        "diloco",
        ours("diloco", every=LOCAL_STEPS, rate=OUTER_RATE, momentum=OUTER_MOMENTUM),
        rounds_per_gradient=1.0 / LOCAL_STEPS,
    ),
    "adpsgd": Column("adpsgd", ours("adpsgd"), in_step=False),
    "hogwild": Column("hogwild", ours("hogwild"), in_step=False, averages=False),
    "decent_dp": Column("Decent-DP ring", decent_dp, rounds_per_gradient=1.0),
    "torchft_ddp": Column("torchft DDP", torchft_ddp, rounds_per_gradient=1.0),
    "torchft_local_sgd": Column("torchft LocalSGD", torchft_local_sgd, rounds_per_gradient=1.0 / LOCAL_STEPS),
    "torchft_diloco": Column("torchft DiLoCo", torchft_diloco, rounds_per_gradient=1.0 / LOCAL_STEPS),
}
"""The columns, by their names for `--only`."""


def case_store(store: Store, number: int) -> Store:
    """A store for one case alone."""
    return PrefixStore(f"case{number}", store)
