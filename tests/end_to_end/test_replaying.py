"""Digits, learnt at uneven speeds, are replayed to the bit: undisturbed, and with a kill, a join and a resume. Real
learners of other speeds that follow the order end with the same bits."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from starling.strategies import STRATEGIES
from starling.training.order import RACES

SMALL = [
    "data.corpus.sets={train: 240, dev: 10, test: 10}",
    "validate_every=null",
    "decoding=null",
    "engine.threads=1",
    "batches.num_workers=0",
    "stragglers.jitter=0.5",
    "checkpoints.every=12",
    "checkpoints.keep=1000",
]
REPLAYED = sorted(set(STRATEGIES) - set(RACES))
OPTIONS = {"hadpsgd": ["strategy.per_node=2"]}


def starling(folder: Path, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "starling", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replaying")


@pytest.fixture
def folder(corpus: Path) -> Iterator[Path]:
    """Where the prepared digits stay, but no experiment: their checkpoints would fill a disk."""
    yield corpus
    shutil.rmtree(corpus / "exp", ignore_errors=True)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("learners", [3, 4])
@pytest.mark.parametrize("strategy", REPLAYED)
def test_digits_are_replayed_and_followed_to_the_bit(strategy: str, learners: int, folder: Path) -> None:
    own = OPTIONS.get(strategy, [])
    if own and learners % 2:
        pytest.skip("super-learners of two need an even number")
    name = f"{strategy}-{learners}"
    common = ["demo", f"name={name}", f"strategy.name={strategy}", f"learners={learners}", *own, *SMALL]
    starling(folder, "train", *common, "budget.epochs=2", "stragglers.slow={1: 1.5x}")
    assert "bit for bit" in " ".join(starling(folder, "replay", f"exp/{name}").split())
    own = [*common, f"name={name}-again", f"follow=exp/{name}", "budget.epochs=2"]
    starling(folder, "train", *own)  # each hash is compared as it is recorded


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", REPLAYED)
def test_digits_of_learners_that_were_killed_and_resumed_are_replayed_to_the_bit(strategy: str, folder: Path) -> None:
    """A super-learner that loses a learner leaves as a whole, so both of its learners join again."""
    own, joins, then = OPTIONS.get(strategy, []), "{join: 1, at_seconds: 6.0}", 3
    if own:
        own, joins, then = [*own, "engine.reduce=ordered"], f"{{join: 0, at_seconds: 6.0}}, {joins}", 4
    name = f"{strategy}-disturbed"
    common = [f"name={name}", f"strategy.name={strategy}", *own, *SMALL]
    disturbed = f"faults=[{{kill: 1, at_step: 8}}, {joins}]"
    starling(folder, "train", "demo", "learners=4", "budget.epochs=2", disturbed, *common)
    starling(folder, "train", "demo", f"learners={then}", "budget.epochs=3", f"resume=exp/{name}", *common)
    said = " ".join(starling(folder, "replay", f"exp/{name}").split())
    assert "bit for bit" in said
