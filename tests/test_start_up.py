"""Commands and learners start quickly: each imports what it needs, torch's compiler only when something compiles."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from starling.errors import EXTRAS, SPEECH

LEARNER = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What torchrun tells a process, of which `import starling` makes a quick start."""

NOT_NEEDED = {
    *("lhotse", "plotly", "tensorboard", "ray", "pandas", "scipy", "simpy", "soundfile", "rich"),
    *("torch._dynamo", "torch._inductor", "sympy", "starling.speech", "starling.experiment", "starling.reporting"),
}

JOIN_AND_STEP = """
import json, sys
import starling
import torch

def imported():
    return sorted(sys.modules)

seen = {"join": imported() if starling.join else []}
for kind in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam"):
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 2)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    seen[kind] = [parameter.tolist() for parameter in model.parameters()]
seen["steps"] = imported()
print(json.dumps(seen))
"""

COMPILE = """
import json, sys
import starling
import torch

torch.manual_seed(3)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
seen = {"before": "torch._dynamo" in sys.modules, "graphs": []}
for _ in range(2):
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()

def backend(graph, inputs):
    seen["graphs"].append([getattr(node.target, "__name__", node.target) for node in graph.graph.nodes])
    return graph.forward

compiled, step = torch.compile(model, backend=backend), torch.compile(optimizer.step, backend=backend)
for _ in range(3):
    optimizer.zero_grad()
    compiled(torch.ones(4, 3)).square().sum().backward()
    step()
seen["weights"] = [parameter.tolist() for parameter in model.parameters()]
seen["after"] = "torch._dynamo" in sys.modules
kept = [torch.optim.AdamW.zero_grad.__wrapped__, torch.optim.AdamW.add_param_group.__wrapped__]
seen["is_stock"] = [getattr(each, "__dynamo_disable", None) is not each for each in kept]
print(json.dumps(seen))
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
def test_a_learner_makes_its_first_steps_without_what_only_others_need() -> None:
    """No speech, no pictures and no compiler, whatever optimizer of torch it has; its weights are those of torch as it
    is installed."""
    quick, plain = outcome(JOIN_AND_STEP, **LEARNER), outcome(JOIN_AND_STEP)
    assert not NOT_NEEDED & set(quick.pop("join"))
    assert not NOT_NEEDED & set(quick.pop("steps"))
    plain.pop("join")
    assert "torch._dynamo" in plain.pop("steps")  # else there is nothing to postpone any more
    assert quick == plain


@pytest.mark.wide
def test_a_learner_that_compiles_its_model_and_its_optimizer_gets_the_graphs_of_torch_as_it_is_installed() -> None:
    """Also when it has made steps before it compiles."""
    quick, plain = outcome(COMPILE, **LEARNER), outcome(COMPILE)
    assert not quick.pop("before")
    assert plain.pop("before")
    assert quick["after"]
    assert len(quick["graphs"]) >= 2
    assert quick["is_stock"] == [True, True]
    assert quick == plain


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
    refused = sorted({module for modules in EXTRAS.values() for module in modules} - {"urllib3", "fsspec"})
    found = outcome(WITHOUT_EXTRAS, json.dumps(refused))
    assert found["events"] > 0
    assert found["loaded"] == []
