"""`docs/write-your-own-task.md` is true: its task trains by the page's own commands, and speech uses the same door."""

import os
import re
import shlex
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from starling.speech.task import SPEECH
from tests.warm_start import WarmProgram

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "write-your-own-task.md").read_text(encoding="utf-8")
(TASK,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(RECIPE,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
WITHIN = 60.0


def run(folder: Path, command: str) -> tuple[int | None, str]:
    """The exit code and what was printed by a command of the page."""
    variable, program, *arguments = shlex.split(command)
    assert (variable, program) == ("PYTHONPATH=.", "starling")
    environment = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    with WarmProgram(["-m", "starling", *arguments], folder, **environment) as started:
        said = started.output.read()
        return started.wait(WITHIN), said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page tells its reader to save."""
    made = tmp_path_factory.mktemp("task")
    (made / "larger.py").write_text(TASK, encoding="utf-8")
    (made / "larger.yaml").write_text(RECIPE, encoding="utf-8")
    return made


@pytest.mark.wide
def test_the_pages_commands_train_resume_audit_and_simulate_its_task(folder: Path) -> None:
    """The model learns; a killed learner's mini-batches are seen; another strategy and number of learners resume it."""
    said = []
    for command in COMMANDS:
        code, output = run(folder, command)
        assert code == 0, f"{command}\n{output}"
        said.append(output)
    trained, survived, resumed, audited, simulated = said
    for output in (trained, survived, resumed):
        (right,) = re.findall(r"(\d+\.\d) % right of 2048 new pairs", output)
        assert float(right) > 95.0
    assert "learner 1 was killed by SIGKILL" in survived
    assert "all learners begin with the mean of its models" in resumed
    assert "4 of 4 complete epochs saw each of 2048 examples exactly once" in audited
    assert "event hash: " in simulated


def test_a_wrong_key_names_the_right_one(folder: Path) -> None:
    """As the page says, before anything starts."""
    code, output = run(folder, "PYTHONPATH=. starling train larger.yaml name=wrong hiden=3")
    assert code == 2
    assert "hiden: unknown key; did you mean hidden?" in output
    assert not (folder / "exp" / "wrong").exists()


def test_a_task_that_does_not_exist_is_one_clear_message(folder: Path) -> None:
    code, output = run(folder, "PYTHONPATH=. starling train larger.yaml name=wrong task=larger:SMALLER")
    assert code == 2
    assert "task: 'larger:SMALLER' cannot be imported: larger has no 'SMALLER'" in output


def test_speech_comes_in_by_the_same_entry_points() -> None:
    """And its name is what a recipe without the key `task` means."""
    (task,) = entry_points(group="starling.tasks", name="speech")
    assert task.load() is SPEECH
    (commands,) = entry_points(group="starling.commands", name="speech")
    names = {command.name or command.callback.__name__ for command in commands.load().registered_commands}
    assert {"prepare", "check", "evaluate", "score", "transcribe", "align", "serve", "export", "demo"} == names
