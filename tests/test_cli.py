"""The command line: help with examples, one clear message for an error, an exit code for each kind."""

import inspect
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from starling.cli import app
from starling.configuration import beneath_fields, owners
from starling.errors import ConfigError
from starling.recipe.run import StrategyChoice
from starling.strategies import STRATEGIES

COMMANDS = (
    *(
        "prepare",
        "check",
        "train",
        "demo",
        "join",
        "simulate",
        "evaluate",
        "audit",
        "status",
        "report",
        "transcribe",
        "align",
        "serve",
    ),
    *("strategies", "recipes copy", "compare", "study staleness", "profile", "plan"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example(command: str) -> None:
    """That begins as one would type it."""
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert f"starling {command}" in " ".join(result.stdout.split("Example:")[1].split())


def test_the_usage_says_what_may_be_repeated() -> None:
    """Each bracket once, as in any manual."""
    usage = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "120"}).stdout
    assert "RECIPE} [KEY=VALUE]...\n" in "\n".join(line.rstrip() for line in usage.splitlines())


def test_the_version_is_told() -> None:
    """That of the installed distribution, for a report of a bug."""
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"starling-asr {version('starling-asr')}\n")


def test_strategies_are_listed_with_a_line_each() -> None:
    """By family and name, with what they do."""
    result = CliRunner().invoke(app, ["strategies"], env={"COLUMNS": "400"})
    listed: dict[str, list[str]] = {}
    heading = ""
    for line in result.stdout.splitlines():
        if line.startswith("  "):
            assert len(line.split()) > 3
            listed[heading].append(line.split()[0])
        else:
            heading = line
            listed[heading] = []
    assert listed.pop("chosen by measuring") == ["auto"]
    assert listed == {kind: [name for name in STRATEGIES if STRATEGIES[name].kind == kind] for kind in listed}
    assert sorted(name for names in listed.values() for name in names) == sorted(STRATEGIES)
    assert {"all-reduce", "gossip", "periodic", "server", "shared memory"} <= set(listed)


@pytest.mark.parametrize("width", [40, 120])
@pytest.mark.parametrize("name", [*STRATEGIES, "auto"])
def test_a_strategy_is_described_by_its_own_docstrings(name: str, width: int) -> None:
    """Every word of them but for `Args` and the example, in lines that fit the terminal."""
    result = CliRunner().invoke(app, ["strategies", name], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= width
    shown = " ".join(result.stdout.split())
    strategy = StrategyChoice(name=name).strategy
    assert shown.startswith(f"{name}: {strategy.summary}")
    text = re.sub(r"^(Args|Example):\n(    .*\n|\n)*", "", f"{inspect.getdoc(strategy.run)}\n", flags=re.MULTILINE)
    for paragraph in re.split(r"\n\n|^[A-Z][\w ]+:\n", text, flags=re.MULTILINE):
        assert " ".join(paragraph.split()).replace("::", ":") in shown
    for option, owner in owners(strategy.options).items():
        field, meaning = owner.model_fields[option], " ".join(beneath_fields(owner)[option].split())
        assert meaning
        assert re.search(rf"\b{option} \([^)]+\): {re.escape(meaning)}", shown)
        assert field.is_required() == (f"{option} (required)" in shown)


def test_a_wrong_strategy_to_describe_names_the_nearest() -> None:
    """As everywhere else."""
    result = CliRunner().invoke(app, ["strategies", "dilco"])
    assert result.exit_code == ConfigError.exit_code
    assert "strategy: 'dilco' is unknown; did you mean 'diloco'?" in result.stderr


def test_help_does_not_load_torch() -> None:
    """It appears at once."""
    code = "import sys, starling.cli; sys.exit('torch' in sys.modules or 'lhotse' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "absent.yaml"], 2, "recipe absent.yaml: no such file"),
        (["train", "r.yaml", "learnrs=2"], 2, "learnrs: unknown key; did you mean learners?"),
        (["train", "r.yaml", "strategy=aut"], 2, "did you mean 'auto'? known are allreduce, "),
        (["simulate", "r.yaml", "learners"], 2, "must have the form key=value"),
        (["prepare", "r.yaml"], 5, "corpus not found"),
        (["check", "r.yaml"], 5, "corpus not found"),
        (["train", "r.yaml"], 5, "corpus not found"),
        (["profile", "absent.yaml"], 2, "recipe absent.yaml: no such file"),
        (["plan"], 2, "name a recipe, such as demo, or --model ibm, or ask for --published"),
        (["plan", "r.yaml"], 2, "give either a profile, made by `starling profile`, or a preset"),
        (["plan", "r.yaml", "--profile", "absent.yaml"], 2, "profile absent.yaml: cannot be read"),
        (["plan", "r.yaml", "--profile", "p.yaml", "--learners", "four"], 2, "'four' is no list of numbers"),
        (["join", "exp/absent"], 2, "exp/absent: no config.yaml here; give an experiment"),
        (["evaluate", "exp/absent"], 2, "exp/absent: no config.yaml here; give an experiment"),
        (["status", "exp/absent"], 2, "exp/absent: no config.yaml here; give an experiment"),
        (["report", "exp/absent"], 2, "exp/absent: no config.yaml here; give an experiment"),
        (["align", "exp/absent", "r.yaml"], 2, "exp/absent: no config.yaml here; give an experiment"),
        (["transcribe", "e", "a.wav", "--align"], 2, "--align finds word times, which --format txt does not have"),
        (["align", "exp/absent", "a.wav"], 5, "a.wav: no such file"),
        (["align", "e", "a.wav", "--format", "text"], 2, "--format text: unknown; did you mean 'textgrid'?"),
        (
            ["align", "e", "a.wav", "b.wav", "--text", "a.txt"],
            2,
            "2 recordings: leave out --text, put the text of each",
        ),
        (["align", "e", "a.wav", "b.wav"], 2, "2 recordings: a TextGrid has one; give a folder as --output"),
        (["align", "e", "x/a.wav", "y/a.wav", "--output", "o"], 2, "several recordings have the same name"),
        (["align", "e", "a.wav", "--voice", "de", "--lexicon", "l"], 2, "--voice and --lexicon both pronounce words"),
        (["transcribe", "exp/absent", "a.wav"], 2, "exp/absent: no config.yaml here; give an experiment"),
        (["train", "r.yaml", "resume=exp/absent"], 6, "exp/absent: no such folder"),
    ],
)
def test_an_error_is_one_message_with_an_exit_code_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, message: str
) -> None:
    """On standard error, without a traceback."""
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(
        "name: r\nbudget: {epochs: 1}\n"
        "data: {folder: data, valid: null, corpus: {kind: tsv, path: absent.tsv, sets: {train: {}, test: {}}}}\n"
    )
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_debug_shows_where_an_error_came_from(tmp_path: Path) -> None:
    """With a traceback, for those who look for a bug."""
    result = subprocess.run(
        [sys.executable, "-m", "starling", "train", str(tmp_path / "absent.yaml"), "--debug"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "Traceback" in result.stderr
    assert "no such file" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", "r.yaml", "--learners", "4"], "learners=4"),
        (["simulate", "r.yaml", "--strategy=adpsgd"], "strategy=adpsgd"),
        (["prepare", "r.yaml", "--data.folder"], "data.folder=VALUE"),
    ],
)
def test_a_key_written_as_an_option_is_answered_with_how_to_write_it(arguments: list[str], hint: str) -> None:
    """With the value that was given."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"Keys of the recipe are written without dashes: {hint}" in " ".join(result.stderr.split())


SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
print("went on")
"""


@pytest.mark.parametrize(("does", "code", "says"), [("import swallows", 130, ""), ("import os", 0, "asked to stop\n")])
def test_ctrl_c_in_an_import_ends_a_command_even_if_the_module_discards_it(
    does: str, code: int, says: str, tmp_path: Path
) -> None:
    """As torch does, which goes on without numpy. Elsewhere, a command is told by a `KeyboardInterrupt`."""
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    program = f"""
import os, signal
import starling.cli

def command(prog_name):
    {does}
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("asked to stop")

starling.cli.app = command
starling.cli.main()
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, says), done.stderr
