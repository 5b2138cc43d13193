"""A worker of `benchmarks.torchft_storm`, with torchft's DiLoCo on the task of `storm_task`: `torchft_worker SETTINGS`.

A worker is a replica group of its own. It writes a line to its log for each gradient and each outer step. When it is
ready, it tells the launcher so, and hears from it when to end: with the first outer step after that time.
"""

import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchft
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft.local_sgd import DiLoCo

from benchmarks.peer_worker import end_with
from benchmarks.rivals import OUTER_MOMENTUM, OUTER_RATE
from benchmarks.storm_task import Sleeping
from starling.experiment.task import job_of, load_recipe
from starling.launch.link import VARIABLE
from starling.workload import Ticket

Seconds = float
RECIPE = Path(__file__).with_name("storm.yaml")
"""Its optimizer is the inner one; the rate is constant."""


@dataclass(frozen=True)
class Settings:
    """What a worker does, and for how long."""

    worker: int
    attempt: int
    """Number of processes that were started earlier, of all workers; each process draws points of its own."""
    lighthouse: str
    """Address of the lighthouse."""
    log: str
    joins: bool
    """Whether the worker replaces a killed one; it then asks for its peers' state before it computes."""
    every: int
    """Number of gradients between two outer steps."""
    seconds: Seconds
    """Time that each gradient sleeps."""
    timeout: Seconds
    """Longest time for an all-reduce, or for the transfer of a state."""


class Group(torchft.ProcessGroupGloo):  # type: ignore[misc]
    """A process group that notes that it was set up again, because the membership changed."""

    is_new = False

    def configure(self, *args: Any, **more: Any) -> None:
        self.is_new = True
        super().configure(*args, **more)


class Manager(torchft.Manager):  # type: ignore[misc]
    """A manager that notes what has become of the newest outer step."""

    committed = healed = False

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.healed = True
        super().load_state_dict(state_dict)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        self.committed = bool(super().should_commit(timeout))
        return self.committed


def main(settings: Settings) -> None:
    line = socket.socket(fileno=int(os.environ.pop(VARIABLE)))
    torch.set_num_threads(1)
    with Path(settings.log).open("w", buffering=1) as log:

        def note(kind: str, **fields: Any) -> None:
            log.write(json.dumps({"kind": kind, "at": time.monotonic(), **fields}) + "\n")

        workload = Sleeping(settings.seconds)
        job = job_of(load_recipe(RECIPE)[1], workload)
        model = workload.make_model()
        optimizer = job.make_optimizer(list(model.parameters()))
        outer = torch.optim.SGD(model.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        limit = timedelta(seconds=settings.timeout)
        group = Group(timeout=limit)
        manager = Manager(
            pg=group,
            load_state_dict=load,
            state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            min_replica_size=1,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=timedelta(seconds=300),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=settings.lighthouse,
            replica_id=str(settings.worker),
            hostname="127.0.0.1",
            init_sync=False,  # models begin equal
        )
        with DiLoCo(manager, [model], optimizer, outer, sync_every=settings.every):
            line.send(b"!")
            ends_at = float(line.recv(64))  # on the clock that all processes of a machine share
            end_with(line)
            note("ready")
            if settings.joins:
                optimizer.zero_grad()
                for _ in range(settings.every - 1):  # steps without gradients, after which DiLoCo's outer step is due
                    optimizer.step()
                outer_step(optimizer.step, manager, group, note)
            for number in itertools.count():
                loading = time.monotonic()
                (batch,) = workload.load(Ticket(settings.attempt, number, number))
                begin = time.monotonic()
                optimizer.zero_grad()
                workload.loss(model, batch).backward()
                if job.clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
                is_last = (number + 1) % settings.every == 0
                if not is_last:
                    optimizer.step()
                note("gradient", loading=loading, begin=begin)
                if is_last:
                    outer_step(optimizer.step, manager, group, note)
                    if time.monotonic() >= ends_at:
                        break
        note("end", step=manager.current_step(), loss=workload.validation_loss(model))
    manager.shutdown(wait=False)
    group.abort()


def outer_step(step: Callable[[], Any], manager: Manager, group: Group, note: Callable[..., None]) -> None:
    """Call the inner step after which DiLoCo's outer step is due, and note what became of it."""
    begin, manager.healed, group.is_new = time.monotonic(), False, False
    step()
    note(
        "outer step",
        begin=begin,
        committed=manager.committed,
        healed=manager.healed,
        regrouped=group.is_new,
        workers=manager.num_participants(),
        step=manager.current_step(),
    )


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
