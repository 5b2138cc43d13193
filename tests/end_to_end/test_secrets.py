"""What stands in the environment stays there."""

import gzip
import io
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from starling.experiment.simulate import simulate_recipe
from starling.speech.recipe import check_recipe
from starling.speech.task import SPEECH
from tests.sessions import run_to_end

Tree = dict[str, Any]
CANARY = "canary-7f3a91c2e5"
SECRETS = dict.fromkeys(("STARLING_CANARY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "STARLING_RUN_TOKEN"), CANARY)


def _files(folder: Path) -> dict[Path, bytes]:
    """Everything below a folder, unpacked."""
    content = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {path: gzip.decompress(each) if path.suffix == ".gz" else each for path, each in content.items()}


def _spoken(files: dict[Path, bytes]) -> list[Path]:
    return [path for path, content in files.items() if CANARY.encode() in content]


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    """Also where it is packed, or in the middle of a binary file."""
    (tmp_path / "a.bin").write_bytes(b"\0\xff" + CANARY.encode() + b"\0")
    (tmp_path / "b.gz").write_bytes(gzip.compress(CANARY.encode()))
    (tmp_path / "c").write_text("nothing")
    assert {path.name for path in _spoken(_files(tmp_path))} == {"a.bin", "b.gz"}


def test_a_run_that_fails_writes_no_value_of_the_environment(tree: Tree, songs: Path, tmp_path: Path) -> None:
    """A real learner that fails, with --debug: neither on the screen nor in any file is there what a variable holds."""
    tree |= {
        "exp": "exp",
        "learners": 1,
        "budget": {"steps": 12},
        "faults": [{"nan": 0, "at_step": step} for step in range(1, 12)],
    }
    (tmp_path / "songs.yaml").write_text(yaml.safe_dump(tree))
    code, said, left = run_to_end(["starling", "train", "songs.yaml", "--debug"], tmp_path, {**os.environ, **SECRETS})
    assert code != 0 and not left
    assert "Traceback" in said and "NonFiniteError" in said
    files = _files(tmp_path) | _files(songs.parent)
    logs = [content for path, content in files.items() if path.name.startswith("learner-") and path.suffix == ".log"]
    assert any(b"Traceback" in content for content in logs)
    assert {"env.txt", "config.yaml", "status.json", "summary.txt"} <= {path.name for path in files}
    assert not _spoken(files)
    assert CANARY not in said


def test_a_simulation_writes_no_value_of_the_environment(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints, curves, records and errors of a run that ended well."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    console = Console(file=io.StringIO())
    simulate_recipe(SPEECH, check_recipe(tree, "r.yaml"), said.append, console)
    files = _files(tmp_path)
    assert {"env.txt", "manifest.json", "errs-test.txt"} <= {path.name for path in files}
    assert not _spoken(files)
    assert isinstance(console.file, io.StringIO)
    assert CANARY not in console.file.getvalue() + "".join(said)
