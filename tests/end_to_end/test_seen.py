"""Real learner processes see every utterance of an epoch exactly once, whatever happens on the way."""

import io
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from starling.checkpoint.reader import latest, load
from starling.experiment.record import audit
from tests.end_to_end.test_train import Tree, starling, written
from tests.warm_start import WarmProgram


@pytest.fixture
def digits(tree: Tree, tmp_path: Path, shared_data: Path | None) -> str:
    """A recipe for real recordings of digits, or for songs where they are absent."""
    recipe = written(tree, tmp_path)
    tree |= {"validate_every": None, "batches": {"max_duration": 5}}
    if shared_data is not None:
        official = yaml.safe_load((Path(__file__).parents[2] / "recipes" / "fsdd.yaml").read_text())
        corpus = official["data"]["corpus"] | {"path": str(shared_data / "fsdd.tsv")}
        tree["data"] = official["data"] | {
            "folder": "data",
            "corpus": corpus,
            "strings": None,
            "train": "test",
            "test": [],
        }
        tree["data"]["filter"]["on_bad"] = "skip"
    (tmp_path / recipe).write_text(yaml.safe_dump(tree))
    return recipe


def audited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `starling audit` says in its last line."""
    monkeypatch.chdir(folder)  # the recipe's paths are relative to where it was used
    said: list[str] = []
    audit(Path("exp/songs"), said.append, Console(file=io.StringIO()))
    return said[-1]


def lose_one_of_three(command: list[str], folder: Path) -> tuple[int, str]:
    """Kill a learner after three checkpoints: the exit code, and what was said afterwards; no learner is left."""
    with WarmProgram(command, folder) as run:
        said = []
        for line in run.output:
            said.append(line)
            if sum(each.startswith("saved") for each in said) == 3:
                break
        learners = run.learners()
        assert len(learners) == 3, "".join(said)
        learners[1].kill()
        message, code = run.output.read(), run.wait(timeout=100)
    assert not any(learner.is_running() for learner in learners)
    return code, message


@pytest.mark.soak
def test_a_run_that_continues_with_fewer_learners_sees_everything_once(
    digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three asynchronous learners, one of them killed inside an epoch; two synchronous ones take over from the newest
    checkpoint, and what the dead one had not done is given out again."""
    command = [
        "-m", "starling", "train", digits, "learners=3", "strategy=adpsgd", "budget.epochs=100000",
        "checkpoints.every=4", "on_loss=stop",
    ]  # fmt: skip
    code, message = lose_one_of_three(command, tmp_path)
    assert code == 3, message
    position = load(latest(tmp_path / "exp" / "songs")).manifest.next_ticket
    resumed = starling(
        tmp_path, "train", "exp/songs/config.yaml", "resume=exp/songs", "learners=2", "strategy=delay-by-one",
        f"budget.epochs={position.epoch + 2}",
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    whole = position.epoch + 2
    assert re.search(
        rf"; {whole} of {whole} complete epochs saw each of \d+ utterances exactly once", audited(tmp_path, monkeypatch)
    )


@pytest.mark.wide
@pytest.mark.parametrize(
    "strategy",
    ["adpsgd", pytest.param("allreduce", marks=pytest.mark.soak), pytest.param("dpsgd", marks=pytest.mark.soak)],
)
def test_survivors_see_what_a_killed_learner_had_begun(
    strategy: str, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three continue to the end of the budget; one of the three saw each utterance of each epoch, once."""
    command = [
        "-m", "starling", "train", digits, "learners=3", f"strategy={strategy}", "budget.epochs=16",
        "checkpoints.every=20",
    ]  # fmt: skip
    code, message = lose_one_of_three(command, tmp_path)
    assert code == 0, message
    assert re.search(r"learner \d was killed by SIGKILL \(last reported: .*\); the others continue without it", message)
    assert re.search(r"songs ended without learner \d: learner \d was killed", message)
    assert "16 of 16 complete epochs saw each of" in audited(tmp_path, monkeypatch)


@pytest.mark.soak
def test_mini_batches_loaded_ahead_when_the_time_is_up_are_given_out_again(
    digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asynchronous learners leave some undone; the checkpoint lists them, and the next run begins with them."""
    for minutes in (0.2, 0.5):  # the processes that load ahead take a while to start, longer where much else is done
        first = starling(
            tmp_path, "train", digits, "strategy=adpsgd", "batches.num_workers=1", "budget.epochs=null",
            f"budget.minutes={minutes}",
        )  # fmt: skip
        assert first.returncode == 0, first.stderr
        position = load(latest(tmp_path / "exp" / "songs")).manifest.position
        if position.outstanding:
            break
    assert position.outstanding
    assert f"except {len(position.outstanding)} that a resumed run computes first" in audited(tmp_path, monkeypatch)
    second = starling(
        tmp_path, "train", "exp/songs/config.yaml", "resume=exp/songs", "learners=1",
        f"budget.epochs={position.next_ticket.epoch + 1}", "budget.minutes=null",
    )  # fmt: skip
    assert second.returncode == 0, second.stderr
    whole = position.next_ticket.epoch + 1
    assert re.search(
        rf"{whole} of {whole} complete epochs saw each of \d+ utterances exactly once", audited(tmp_path, monkeypatch)
    )
