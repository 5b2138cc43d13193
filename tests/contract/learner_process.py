"""The program of a learner process in the contract tests: runs every case it is told to, one after the other."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.distributed_c10d import PrefixStore

from starling.engines.job import Silence
from starling.engines.processes import Place, run_learner
from starling.launch.rendezvous import find_place
from tests.contract.cases import cases


def main(names: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    place = find_place()
    for number, name in enumerate(names):
        store = PrefixStore(f"case{number}", place.store)
        own = Place(place.rank, place.world, place.local_rank, place.local_world, store)
        state = run_learner(cases()[name].job(place.world), own, torch.device("cpu"), name, Silence())
        save_file({"weights": state.weights.clone()}, folder / f"{number}-{place.rank}.safetensors")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
