"""The program of a learner that makes runs one after another and writes down what it recorded: `learner RUNS
FOLDER`."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from benchmarks.plain_loop import plain_loop, tickets_of
from benchmarks.runs import DDP, SENDING, Notes, Outcome, Run, weights_file
from benchmarks.slow_link import SlowLink
from benchmarks.tuned_ddp import tuned_ddp
from starling.engines.processes.handshake import Peers
from starling.engines.processes.member import run_learner
from starling.engines.processes.place import Place
from starling.engines.processes.process_group import process_group
from starling.launch.link import Link, reported_errors
from starling.launch.rendezvous import find_place

CPU = torch.device("cpu")
TIMEOUT_SECONDS = 120.0


def main(runs: list[Run], folder: Path) -> None:
    torch.set_num_threads(1)
    place = find_place()
    outcomes: list[Outcome | None] = []
    for number, run in enumerate(runs):
        if place.rank >= run.world:
            outcomes.append(None)  # the others' run: meanwhile this process waits for the next one to begin
            continue
        own = Place(place.rank, run.world, place.local_rank, run.world, PrefixStore(f"run{number}", place.store))
        notes = Notes(run)
        be_learner(run, own, notes)
        outcomes.append(notes.outcome)
        if notes.weights is not None:
            notes.weights.numpy().tofile(weights_file(folder, number, place.rank))
    noted = [None if outcome is None else outcome.as_json() for outcome in outcomes]
    (folder / f"outcomes-{place.rank}.json").write_text(json.dumps(noted))
    Peers(place, TIMEOUT_SECONDS).part()  # learner 0 may keep the store


def be_learner(run: Run, place: Place, notes: Notes) -> None:
    """Act as a learner of `run`."""
    link = None if run.bytes_per_second is None else SlowLink(run.bytes_per_second)
    with nullcontext() if link is None else link.under_messages():
        if run.strategy not in (DDP, SENDING):
            run_learner(notes.job, place, CPU, "bench", notes, timeout_seconds=TIMEOUT_SECONDS)
            return
        peers = Peers(place, TIMEOUT_SECONDS)
        with process_group(peers, CPU):
            if run.strategy == DDP:
                reduce(run, place, notes, link)
            else:
                send(run, place, notes)
            notes.ended()
            peers.part()


def reduce(run: Run, place: Place, notes: Notes, link: SlowLink | None) -> None:
    """Train with tuned DistributedDataParallel for a fixed number of steps."""
    if run.steps is None:
        raise ValueError("plain DDP needs a number of steps")

    def wrap(model: nn.Module) -> nn.Module:
        reducing = tuned_ddp(model)
        return reducing if link is None else link.under_reducing(reducing, place.world)

    job, sync_every = notes.job, int(run.options.get("sync_every", 1))
    for _ in plain_loop(job, tickets_of(job, run.steps, place.rank, place.world), CPU, wrap, sync_every):
        notes.gradient_made()
    notes.outcome.rounds = len(notes.outcome.stamps) // sync_every


def send(run: Run, place: Place, notes: Notes) -> None:
    """Send as many numbers as the model has from learner 0, which waits until they have arrived."""
    model, word = torch.zeros(run.num_parameters), torch.zeros(1)
    for _ in range((run.steps or 0) + 1):
        if place.rank == 0:
            sending = dist.isend(model, 1)
            if sending is not None:
                sending.wait()
            dist.recv(word, 1)
            notes.gradient_made()
        else:
            dist.recv(model, 0)
            dist.send(word, 0)


if __name__ == "__main__":
    with reported_errors(Link.from_environment()):
        main(Run.from_json(sys.argv[1]), Path(sys.argv[2]))
