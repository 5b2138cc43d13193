"""A process that reads a large set as in training, but does not train: `scale_reader FOLDER EPOCH PLACE UTTERANCES
RESULT`.

It opens the set, loads the mini-batch at PLACE (0 to 1) of an epoch as a resumed learner does, continues through the
plan for UTTERANCES utterances, and records in RESULT how long the first mini-batch took and how much memory everything
used.
"""

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.large_set import RATE
from starling.speech.features import LogMel
from starling.speech.recipe import Recipe, check_recipe
from starling.speech.recogniser import Recogniser
from starling.speech.store import Member, SpeechSets
from starling.speech.tokens import CharacterTokenizer
from starling.speech.training.plan import UtterancePlan
from starling.speech.training.workload import SpeechWorkload
from starling.workload import Ticket

MEBIBYTE = 2**20
KINDS = ("Anon", "File")
"""Kinds of memory: the process's own, and pages of mapped files that it has touched."""


def main(folder: Path, epoch: int, place: float, utterances: int, result: Path) -> None:
    torch.set_num_threads(1)
    recipe = recipe_for(folder)
    features = LogMel(recipe.features, RATE)
    features(torch.rand(RATE))  # what any process does once
    before = memory()
    begin = time.perf_counter()
    workload = open_workload(recipe, features, folder)
    index = int(place * workload.num_batches(epoch))
    first = workload.load(Ticket(epoch, index, 0))
    seconds = time.perf_counter() - begin
    plan, seen = workload.plan, 0
    while seen < utterances:
        for micro_batch in plan.of(Ticket(epoch, index, 0)):
            seen += sum(plan.utterances.text(utterance) != "" for utterance in micro_batch.tolist())
        index = (index + 1) % plan.num_batches(epoch)
    growth = {kind.lower(): after - before[kind] for kind, after in memory().items()}
    result.write_text(json.dumps({"seconds": seconds, "first": sum(each.num_examples for each in first), **growth}))


def recipe_for(folder: Path) -> Recipe:
    """The usual recipe, for a corpus that is never prepared."""
    return check_recipe(
        {
            "name": "scale",
            "budget": {"epochs": 1},
            "data": {
                "folder": str(folder.parent),
                "corpus": {"kind": "synthetic", "sets": {"train": 1}},
                "sampling_rate": RATE,
                "valid": None,
                "test": [],
            },
        },
        "scale",
    )


def open_workload(recipe: Recipe, features: LogMel, folder: Path) -> SpeechWorkload:
    """Open the training set as a learner does, with everything in it kept."""
    train = SpeechSets([Member("", folder)])
    tokenizer = CharacterTokenizer("ABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    with TemporaryDirectory() as initial:
        Recogniser.create(recipe.model, features, tokenizer, seed=0).save(Path(initial))
        return SpeechWorkload(UtterancePlan(recipe, train), Path(initial))


def memory() -> dict[str, float]:
    """Memory of this process in mebibytes, by kind."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {kind: int(lines[f"Rss{kind}"].split()[0]) * 1024 / MEBIBYTE for kind in KINDS}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
