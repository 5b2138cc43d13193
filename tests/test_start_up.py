"""Commands and learners start quickly: each imports only what it needs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from starling.errors import EXTRAS, SPEECH

NOT_NEEDED = {
    *("lhotse", "plotly", "tensorboard", "ray", "pandas", "scipy", "simpy", "soundfile", "rich"),
    *("starling.speech", "starling.experiment", "starling.reporting"),
}

JOIN = """
import json, sys
import starling

print(json.dumps({"loaded": sorted(sys.modules) if starling.join else []}))
"""

RUN_COMMAND = """
import json, sys
from typer.testing import CliRunner
from starling.cli import app

before = set(sys.modules)
result = CliRunner().invoke(app, sys.argv[1:])
print(json.dumps({"code": result.exit_code, "said": result.output, "loaded": sorted(sys.modules)}))
"""

WITHOUT_EXTRAS = """
import json, sys
from importlib.machinery import PathFinder

REFUSED = set(json.loads(sys.argv[1]))
find_spec = PathFinder.find_spec

def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in REFUSED else find_spec(name, path, target)

PathFinder.find_spec = staticmethod(find_others)

import torch
from dataclasses import dataclass
import starling
from starling import Budget, Cluster, Job, STRATEGIES, VirtualEngine, Workload

@dataclass(frozen=True)
class Points:
    inputs: torch.Tensor
    num_frames = 0
    seconds = 0.0

    @property
    def num_examples(self):
        return len(self.inputs)

    def to(self, device):
        return self

class Line(Workload):
    def make_model(self):
        torch.manual_seed(1)
        return torch.nn.Linear(2, 1)

    def num_batches(self, epoch):
        return 4

    def load(self, ticket):
        return [Points(torch.full((3, 2), float(ticket.index)))]

    def loss(self, model, examples):
        return model(examples.inputs).square().mean()

model = torch.nn.Linear(3, 2)
learner = starling.join(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="adpsgd")
model(torch.ones(4, 3)).square().sum().backward()
learner.step()
learner.close()
strategy = STRATEGIES["adpsgd"]
job = Job(
    workload=Line(), strategy=strategy, options=strategy.options(), budget=Budget(epochs=1),
    make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
)
events = VirtualEngine(job, 4, Cluster()).run().num_events
print(json.dumps({"events": events, "loaded": sorted(REFUSED & set(sys.modules))}))
"""


def outcome(code: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """What a Python process prints that runs `code`."""
    command = [sys.executable, "-c", code, *arguments]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout))


@pytest.mark.wide
def test_a_loop_of_its_own_loads_only_what_it_needs() -> None:
    """No speech, and no pictures."""
    loaded = set(outcome(JOIN)["loaded"])
    assert "torch" in loaded
    assert not NOT_NEEDED & loaded


NO_TORCH = {"torch", "simpy", "safetensors.torch", *SPEECH} - {"urllib3"}
"""What no command loads that only reads. `urllib3` may come with an editable install."""


@pytest.mark.wide
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "Train speech recognisers"),
        (["train", "--help"], "RECIPE"),
        (["strategies"], "adpsgd"),
        (["recipes"], "demo"),
        (["status", "EXP"], "no status.json"),
        (["audit", "EXP"], "was computed once"),
        (["report", "EXP"], "wrote"),
    ],
)
def test_commands_that_compute_nothing_do_not_load_torch(arguments: list[str], said: str, kept: Path) -> None:
    """Nor lhotse, nor what reads audio: they answer within half a second."""
    found = outcome(RUN_COMMAND, *(str(kept / "exp" / "kept") if each == "EXP" else each for each in arguments))
    assert said in found["said"], found["said"]
    assert not NO_TORCH & set(found["loaded"])


@pytest.mark.wide
def test_transcribing_loads_what_it_needs(kept: Path) -> None:
    """Beside torch, soundfile and the model: neither lhotse, nor what scores and draws, nor the checks of a recipe."""
    found = outcome(RUN_COMMAND, "transcribe", str(kept / "exp" / "kept"), str(kept / "corpus" / "8.flac"))
    assert found["said"].endswith("8.flac\tBA\n")
    assert "soundfile" in found["loaded"]
    needless = {"lhotse", "kaldialign", "rensa", "fsspec", "scipy", "tensorboard", "torch._dynamo"}
    assert not (needless | {"sentencepiece", "starling.speech.recipe"}) & set(found["loaded"])


def test_checking_a_recipe_loads_neither_torch_nor_lhotse() -> None:
    """Configuration is apart from what it configures."""
    code = "import json, sys; from pathlib import Path; import starling; starling.load_recipe(Path('demo')); "
    found = outcome(code + "print(json.dumps({'loaded': list(sys.modules)}))")
    assert not NO_TORCH & set(found["loaded"])


@pytest.mark.wide
def test_joining_and_simulating_need_no_extra() -> None:
    """`pip install starling-asr` is enough for a loop or a workload of one's own."""
    refused = sorted(
        {module.partition(".")[0] for modules in EXTRAS.values() for module in modules} - {"urllib3", "fsspec"}
    )
    found = outcome(WITHOUT_EXTRAS, json.dumps(refused))
    assert found["events"] > 0
    assert found["loaded"] == []
