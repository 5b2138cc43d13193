"""What an installation brings: a light base, extras, and the recipes."""

import re
import tomllib
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from typer.testing import CliRunner

import starling
from starling import errors
from starling.cli import app
from starling.errors import MissingExtraError
from starling.speech.recipe import load_recipe

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {
    "flashlight-text": "flashlight",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry-sdk": "opentelemetry.sdk",
}
"""Packages that are imported by another name."""
STUDIES = {"large_batches", "non_iid", "staleness", "staleness_ctc", "stragglers", "stragglers_rates", "topology"}
STUDIES |= {"communication", "models", "muloco", "speed_up"}
"""Recipes with a section `compare`."""
BASES = {"large", "small"}
"""Recipes without `data`, for others to build on."""
RECIPES = (
    STUDIES
    | BASES
    | {
        *("demo", "demo_frames", "fsdd", "fsdd_dnn", "fsdd_frames", "fsdd_frames_dev"),
        *(
            "fsdd_left_out",
            "fsdd_left_out_frames",
            "fsdd_left_out_readers",
            "fsdd_speakers",
            "ibm_frames",
            "reader",
            "reader_children",
            "readers",
            "speechocean",
            "spelling",
        ),
    }
)
RECIPES |= {"librispeech100", "mini_librispeech", "common_voice", "mls", "peoples_speech", "gigaspeech"}  # corpora
RECIPES |= {"switchboard", "timit", "yesno", "domains", "languages", "streaming"}


def packages(requirements: list[str]) -> set[str]:
    """The names in a list of requirements, those of extras of our own written out."""
    found = set()
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9_.-]+)(?:\[([a-z,]+)\])?", requirement)
        assert match is not None
        if match[1] == "starling-asr":
            for extra in match[2].split(","):
                found |= packages(PROJECT["optional-dependencies"][extra])
        else:
            found.add(MODULES.get(match[1], match[1].replace("-", "_")))
    return found


def test_the_base_is_light() -> None:
    """What `join` and the engines import, and nothing of speech."""
    base = {"torch", "numpy", "simpy", "pydantic", "pyyaml", "typer", "rich", "safetensors", "greenlet", "jinja2"}
    assert packages(PROJECT["dependencies"]) == base


@pytest.mark.parametrize("extra", errors.EXTRAS)
def test_an_extra_is_checked_for_all_that_it_installs(extra: str) -> None:
    """The modules that `require` looks for are those of pyproject.toml."""
    assert set(errors.EXTRAS[extra]) == packages(PROJECT["optional-dependencies"][extra])


def test_all_extras_together_are_all() -> None:
    """`[all]` leaves none out, but for what only developers need, and the libraries that a loop comes with."""
    hosts = ("lightning", "huggingface")
    everything = {module for extra, modules in errors.EXTRAS.items() if extra not in hosts for module in modules}
    assert packages(PROJECT["optional-dependencies"]["all"]) == everything


@pytest.fixture
def no_speech(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without lhotse and kaldialign."""
    find = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name in ("lhotse", "kaldialign") else find(name))


@pytest.mark.usefixtures("no_speech")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["prepare", "demo"], "starling prepare"),
        (["check", "demo"], "starling check"),
        (["train", "demo"], "starling train"),
        (["simulate", "demo"], "starling simulate"),
        (["evaluate", "exp/demo"], "starling evaluate"),
        (["transcribe", "exp/demo", "a.wav"], "starling transcribe"),
        (["align", "exp/demo", "a.wav"], "starling align"),
        (["export", "exp/demo", "model"], "starling export"),
        (["compare", "demo"], "starling compare"),
        (["study", "staleness"], "starling compare"),
    ],
)
def test_a_command_names_the_extra_that_it_misses(arguments: list[str], named: str) -> None:
    """In one line, with the one that installs it, before anything is written."""
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {named} needs lhotse, kaldialign: pip install 'starling-asr[speech]'\n"


@pytest.mark.usefixtures("no_speech")
def test_the_demo_needs_its_own_extra() -> None:
    """Which brings the synthesiser, too."""
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2
    assert result.stderr == "error: starling demo needs lhotse, kaldialign: pip install 'starling-asr[demo]'\n"


def test_a_report_needs_an_extra_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the command line, and in Python."""
    find = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "plotly" else find(name))
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr == "error: starling report needs plotly: pip install 'starling-asr[report]'\n"
    with pytest.raises(MissingExtraError, match="needs plotly"):
        starling.report(tmp_path)


@pytest.mark.usefixtures("no_speech")
def test_a_public_name_of_speech_names_the_extra() -> None:
    """For those who use Starling as a library."""
    with pytest.raises(MissingExtraError, match=r"starling\.Recogniser needs .*pip install 'starling-asr\[speech\]'"):
        _ = starling.Recogniser
    with pytest.raises(MissingExtraError, match=r"starling\.load_model needs .*pip install 'starling-asr\[speech\]'"):
        _ = starling.load_model


def test_the_wheel_holds_the_recipes_and_nothing_beside_the_package() -> None:
    """So that they are there after `pip install`."""
    files = {each.distribution_path for each in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {f"starling/recipes/{name}.yaml" for name in RECIPES} <= files
    assert {"starling/py.typed", "starling/cli.py", "starling/reporting/page.html.jinja"} <= files
    assert all(file.startswith("starling/") for file in files)


def test_recipes_are_listed_with_a_line_each() -> None:
    """By the name that commands take."""
    result = CliRunner().invoke(app, ["recipes"], env={"COLUMNS": "400"})
    lines = result.stdout.splitlines()
    assert {line.split()[0] for line in lines} == RECIPES
    assert all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_copied_recipe_is_complete(name: str, tmp_path: Path) -> None:
    """It comes with those that it builds on, and loads as the one that was copied."""
    result = CliRunner().invoke(app, ["recipes", "copy", name, str(tmp_path / "mine")])
    assert result.exit_code == 0, result.stderr
    copies = [Path(line) for line in result.stdout.splitlines()]
    assert copies[0] == tmp_path / "mine" / f"{name}.yaml"
    assert all(copy.is_file() for copy in copies)
    if name not in STUDIES | BASES:  # a comparison is more than a recipe, a base less
        assert load_recipe(copies[0]) == load_recipe(Path(name))


def test_a_copy_replaces_nothing(tmp_path: Path) -> None:
    """What somebody changed stays."""
    assert CliRunner().invoke(app, ["recipes", "copy", "demo", str(tmp_path)]).exit_code == 0
    result = CliRunner().invoke(app, ["recipes", "copy", "demo", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr == f"error: {tmp_path / 'demo.yaml'}: exists already; remove it, or copy to another folder\n"


def test_an_unknown_recipe_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    """And the nearest of them."""
    result = CliRunner().invoke(app, ["recipes", "copy", "dem", str(tmp_path)])
    assert result.exit_code == 2
    assert (
        "recipe 'dem' is unknown; did you mean 'demo'? known are common_voice, communication, demo, " in result.stderr
    )


def test_a_file_goes_before_a_recipe_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is a path."""
    monkeypatch.chdir(tmp_path)
    shipped = load_recipe(Path("demo"))
    Path("demo").write_text("budget: [", encoding="utf-8")
    with pytest.raises(starling.StarlingError, match="recipe demo, line 1: not valid YAML"):
        load_recipe(Path("demo"))
    assert shipped.name == "demo"


def test_the_demo_is_the_recipe_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the keys that are given; `make demo` trains it."""
    trained = []
    monkeypatch.setattr(
        "starling.experiment.train.run_training", lambda task, recipe, tell, console: trained.append(recipe)
    )
    result = CliRunner().invoke(app, ["demo", "learners=2"])
    assert result.exit_code == 0, result.output
    assert trained == [load_recipe(Path("demo"), ["learners=2"])]
    assert "$(BIN)/starling demo\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
