"""`docs/write-your-own-strategy.md` is true: its example runs, from the page's own text, on both engines."""

import ast
import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from starling import STRATEGIES, Budget, Cluster, Job, Learner, Strategy, VirtualEngine, load_recipe
from starling.cli import app
from starling.engines.virtual.cluster import ComputeModel
from starling.errors import ConfigError
from starling.learner import Background, LocalOptimizer, Shards
from tests.contract.cases import sgd
from tests.contract.oracle import columns, gradient_of_regression
from tests.contract.problems import TinyRegression
from tests.warm_start import WarmProgram

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "write-your-own-strategy.md").read_text(encoding="utf-8")
STRATEGY_TEXT, LOOP_TEXT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
NAME = "local_sgd:LOCAL_SGD"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two files that the page tells its reader to save."""
    made = tmp_path_factory.mktemp("own")
    (made / "local_sgd.py").write_text(STRATEGY_TEXT, encoding="utf-8")
    (made / "two_learners.py").write_text(LOOP_TEXT, encoding="utf-8")
    return made


@pytest.fixture
def local_sgd(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's module, importable as in the reader's shell."""
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("local_sgd")
    del sys.modules["local_sgd"]


def simulated(module: ModuleType, learners: int, every: int, learning_rate: float = 0.1) -> list[Tensor]:
    """The final weights on the virtual engine, by rank."""
    job = Job(
        TinyRegression(),
        NAME,  # type: ignore[arg-type]
        Budget(steps=24),
        sgd(learning_rate),
        options=module.LocalOptions(every=every),
    )
    cluster = Cluster(compute=ComputeModel(distribution="uniform", seconds=0.1, spread=0.5))
    return [state.weights for state in VirtualEngine(job, learners, cluster).run().states]


def start() -> Tensor:
    return torch.cat([part.detach().reshape(-1) for part in TinyRegression().make_model().parameters()])


@pytest.mark.parametrize("every", [1, 3, 5])
@pytest.mark.parametrize("learners", [2, 3])
def test_the_virtual_engine_follows_the_pages_equation(local_sgd: ModuleType, learners: int, every: int) -> None:
    """The oracle is the equation in NumPy, one column of weights for each learner."""
    gradient = gradient_of_regression()
    expected = np.tile(start().double().numpy()[:, None], (1, learners))
    for k in range(24 // learners):
        expected = expected - 0.1 * columns(expected, gradient, k)
        if (k + 1) % every == 0:
            expected = np.tile(expected.mean(axis=1, keepdims=True), (1, learners))
    measured = torch.stack(simulated(local_sgd, learners, every), dim=1).double().numpy()
    np.testing.assert_allclose(measured, expected, rtol=0.0, atol=2e-6)


def test_one_learner_and_no_learning_keep_what_the_page_says(local_sgd: ModuleType) -> None:
    """One learner is plain SGD to the bit; with learning rate 0 no learner moves."""
    (alone,) = simulated(local_sgd, 1, every=4)
    job = Job(TinyRegression(), STRATEGIES["allreduce"], Budget(steps=24), sgd(0.1))
    (plain,) = VirtualEngine(job, 1).run().states
    assert torch.equal(alone, plain.weights)
    for weights in simulated(local_sgd, 3, every=2, learning_rate=0.0):
        torch.testing.assert_close(weights, start(), rtol=0.0, atol=1e-6)


@pytest.mark.wide
def test_two_real_processes_follow_the_pages_equation(folder: Path) -> None:
    """The page's own command, and an oracle that makes both learners' steps in one loop."""
    (command,) = [line for line in COMMANDS if line.startswith("torchrun ")]
    words = ["-m", "torch.distributed.run", "--standalone", *shlex.split(command)[1:]]
    environment = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "OMP_NUM_THREADS": "1"}
    with WarmProgram(words, folder, **environment) as run:
        printed = run.output.read()
        assert run.wait(100.0) == 0, printed
    said = dict(re.findall(r"learner (\d) of 2: (\[[^]]*\])", printed))  # both may write at once
    assert said.keys() == {"0", "1"}
    assert said["0"] == said["1"]
    torch.testing.assert_close(torch.tensor(json.loads(said["0"])), _both_learners_in_one_loop(), rtol=0.0, atol=1e-6)


def _both_learners_in_one_loop() -> Tensor:
    """The mean of the weights that two learners end with."""
    torch.manual_seed(0)
    first = nn.Linear(4, 1)
    models = [first, nn.Linear(4, 1)]
    models[1].load_state_dict(first.state_dict())
    examples = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for step in range(50):
        for model, generator in zip(models, examples, strict=True):
            inputs = torch.randn(16, 4, generator=generator)
            model.zero_grad()
            nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        if (step + 1) % 4 == 0:
            with torch.no_grad():
                for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
                    one.copy_((one + other) / 2)
                    other.copy_(one)
    return (models[0].weight.detach() + models[1].weight.detach()).flatten() / 2


@pytest.mark.parametrize("command", [line for line in COMMANDS if " starling " in line])
def test_a_recipe_takes_the_pages_strategy(local_sgd: ModuleType, command: str) -> None:
    """Its options are checked by the strategy's own class."""
    variable, program, what, recipe, *overrides = shlex.split(command)
    assert (variable, program, what in ("train", "simulate")) == ("PYTHONPATH=.", "starling", True)
    choice = load_recipe(Path(recipe), overrides).strategy
    assert choice.strategy is local_sgd.LOCAL_SGD
    assert choice.options == local_sgd.LocalOptions(every=16)
    with pytest.raises(ConfigError, match=r"strategy\.evry: unknown key; did you mean strategy\.every\?"):
        load_recipe(Path(recipe), [f"strategy={{name: '{NAME}', evry: 3}}"])


def test_the_page_has_a_row_for_every_field_of_a_strategy() -> None:
    """But for the three that every strategy has."""
    table = PAGE.partition("| field | default |")[2].partition("\n\n")[0]
    rows = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert rows == set(Strategy.__dataclass_fields__) - {"name", "summary", "run"}


def test_the_page_has_a_row_for_every_method_of_the_helper_objects() -> None:
    """With its object. Of the learner's own methods the page has the ten that most strategies need."""
    table = PAGE.partition("| object | member |")[2].partition("\n\n")[0]
    found: dict[str, set[str]] = {}
    for name, member in re.findall(r"^\| (?:`me\.(\w+)`)? ?\| `(\w+)", table, re.MULTILINE):
        found.setdefault(name or list(found)[-1], set()).add(member)
    kinds = {"optimizer": LocalOptimizer, "background": Background, "shards": Shards}
    assert found == {name: set(kind.__abstractmethods__) for name, kind in kinds.items()}
    table = PAGE.partition("| method | what it does |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)", table, re.MULTILINE)
    assert len(rows) == 10
    assert {*rows, "rank", "world", "seed", *kinds} <= {*Learner.__abstractmethods__, "exchange"}


def test_the_pages_example_of_an_example_is_true() -> None:
    """It is DiLoCo's own."""
    (block,) = re.findall(r"```text\n(Example:\n.*?)```", PAGE, re.DOTALL)
    assert "".join(block.split()) in "".join((STRATEGIES["diloco"].run.__doc__ or "").split())


def test_the_pages_strategy_is_described(local_sgd: ModuleType) -> None:
    """By the command that the page names."""
    (name,) = re.findall(r"`PYTHONPATH=\. starling strategies (\S+)`", PAGE)
    shown = " ".join(CliRunner().invoke(app, ["strategies", name]).stdout.split())
    assert (local_sgd.local_sgd.__doc__ or "-") in shown
    assert "every (8): H, the steps between two averages." in shown


def test_the_pages_strategy_is_short() -> None:
    """As the page promises."""
    assert len(STRATEGY_TEXT.splitlines()) <= 30
    assert ast.parse(STRATEGY_TEXT)
