"""The packages: the same commit gives the same bytes, and what describes them agrees."""

import hashlib
import os
import re
import shutil
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the wheel is built from, in another folder, with other times and permissions."""
    made = tmp_path / "copy"
    made.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, made / name)
    shutil.copytree(
        ROOT / "src", made / "src", ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copyfile
    )
    for number, path in enumerate(sorted(made.rglob("*.py"))):
        os.utime(path, (number * 1e6, number * 1e6))
        path.chmod(0o600)
    return made


def wheel(source: Path, folder: Path) -> str:
    """The SHA-256 of a wheel that is built from a folder."""
    (built,) = WheelBuilder(str(source)).build(directory=str(folder))
    return hashlib.sha256(Path(built).read_bytes()).hexdigest()


def test_the_same_sources_give_the_same_wheel(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the times, permissions and folder of files; another time of the commit gives another wheel."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    one = wheel(ROOT, tmp_path / "one")
    assert wheel(copy, tmp_path / "other") == one
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1800000000")
    assert wheel(copy, tmp_path / "later") != one


@pytest.mark.wide
def test_the_wheel_from_the_sdist_is_that_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What package indexes offer for other systems is the same."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    shutil.unpack_archive(sdist, tmp_path / "unpacked")  # `filter` takes Python 3.11.4
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert wheel(unpacked, tmp_path / "from-sdist") == wheel(ROOT, tmp_path / "from-checkout")
    (built,) = (tmp_path / "from-checkout").iterdir()
    with zipfile.ZipFile(built) as archive:
        assert {each.date_time[:3] for each in archive.infolist()} == {(2023, 11, 14)}


def test_the_citation_agrees_with_the_package() -> None:
    """Version, licence and authors."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert citation["authors"] == PROJECT["authors"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_forges_ci_calls_parts_that_exist_on_the_versions_that_the_package_names() -> None:
    """Linux and macOS, Python 3.11 to 3.14."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    parts = {command.removeprefix(".ci/run ") for command in commands}
    assert parts == {"lint", "docs", "demo", "test", "smoke"}
    assert all(re.search(rf"(^|[ |]){part}( \||\))", CI, re.MULTILINE) for part in parts)
    matrix = jobs["tests"]["strategy"]["matrix"]
    named = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", each)]
    assert matrix == {"os": ["ubuntu-latest", "macos-latest"], "python": named}
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_the_hooks_before_a_commit_are_the_checks_of_make_lint() -> None:
    """The same programs, from the same environment."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    (local,) = hooks
    programs = {hook["entry"].split()[0] for hook in local["hooks"]}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lint = makefile.split("\nlint: setup\n")[1].split("\n\n")[0]
    assert set(re.findall(r"\$\(BIN\)/([\w-]+)", lint)) <= programs
    assert local["repo"] == "local"


def test_the_changelog_is_by_release_and_kind() -> None:
    """The newest release first; each line stands under a kind of Keep a Changelog, in its order."""
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    versions = [[int(number) for number in release.split()[0].split(".")] for release in releases]
    assert versions == sorted(versions, reverse=True)
    for release in releases:
        before, *parts = re.split(r"^### ", release, flags=re.MULTILINE)
        assert not before.partition("\n")[2].strip(), f"a line without a kind: {before[:200]}"
        found = [part.partition("\n")[0] for part in parts]
        assert found == [kind for kind in kinds if kind in found]
        assert all(re.search("^- ", part, re.MULTILINE) for part in parts)
