"""The program of a process in the contract tests: a learner of every case that it is a member of, one by one."""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.distributed_c10d import PrefixStore

from starling.engines.processes.member import run_learner
from starling.engines.processes.place import Place, choose_device
from starling.launch.rendezvous import find_place
from starling.training.job import Observer
from tests.contract.cases import cases


def main(runs: list[tuple[str, list[int]]], folder: Path, device: str = "cpu") -> None:
    """Each run is the name of a case and the processes that are its learners, by rank. Those on `cuda` share one."""
    torch.set_num_threads(1)
    if device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    place = find_place()
    for number, (name, members) in enumerate(runs):
        if place.rank not in members:
            continue
        rank, world = members.index(place.rank), len(members)
        own = Place(rank, world, rank, world, PrefixStore(f"case{number}", place.store))
        state = run_learner(cases()[name].job(world), own, choose_device(device, own), name, Observer())
        save_file({"weights": state.weights.clone()}, folder / f"{number}-{rank}.safetensors")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
