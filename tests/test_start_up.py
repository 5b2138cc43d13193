"""A learner of anybody's loop starts quickly: it imports what it needs, and torch's compiler only for who compiles."""

import json
import os
import subprocess
import sys
from typing import Any

LEARNER = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What torchrun tells a process, of which `import starling` makes a quick start."""

NOT_NEEDED = {
    *("lhotse", "matplotlib", "plotly", "tensorboard", "dask", "pandas", "scipy", "simpy", "soundfile", "rich"),
    *("torch._dynamo", "torch._inductor", "sympy", "starling.speech", "starling.runs", "starling.report"),
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


def outcome(code: str, **environment: str) -> dict[str, Any]:
    """What a Python process prints that runs `code`."""
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout))


def test_a_learner_makes_its_first_steps_without_what_only_others_need() -> None:
    """No speech, no pictures and no compiler, whatever optimizer of torch it has; its weights are those of torch as it
    is installed."""
    quick, plain = outcome(JOIN_AND_STEP, **LEARNER), outcome(JOIN_AND_STEP)
    assert not NOT_NEEDED & set(quick.pop("join"))
    assert not NOT_NEEDED & set(quick.pop("steps"))
    plain.pop("join")
    assert "torch._dynamo" in plain.pop("steps")  # else there is nothing to postpone any more
    assert quick == plain


def test_a_learner_that_compiles_its_model_and_its_optimizer_gets_the_graphs_of_torch_as_it_is_installed() -> None:
    """Also when it has made steps before it compiles."""
    quick, plain = outcome(COMPILE, **LEARNER), outcome(COMPILE)
    assert not quick.pop("before")
    assert plain.pop("before")
    assert quick["after"]
    assert len(quick["graphs"]) >= 2
    assert quick["is_stock"] == [True, True]
    assert quick == plain
