"""Starling trains speech recognisers, and any PyTorch model, with many learners that agree in step or not at all.

The public names below are loaded when they are first used. A process that torchrun or Starling started as a learner
loads torch at once, so that it need not load all of it.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starling.budget import Budget, Schedule
    from starling.engines.loop.joined import JoinedLearner, LoopStats
    from starling.engines.virtual.cluster import Cluster
    from starling.engines.virtual.engine import VirtualEngine
    from starling.errors import StarlingError
    from starling.launch.joining import join
    from starling.learner import Learner
    from starling.runs.recipe.recipe import Recipe, load_recipe
    from starling.speech.recogniser import Recogniser
    from starling.strategies import STRATEGIES
    from starling.training.job import Job
    from starling.workload import Ticket, Workload

__all__ = [
    "STRATEGIES",
    "Budget",
    "Cluster",
    "Job",
    "JoinedLearner",
    "Learner",
    "LoopStats",
    "Recipe",
    "Recogniser",
    "Schedule",
    "StarlingError",
    "Ticket",
    "VirtualEngine",
    "Workload",
    "join",
    "load_recipe",
]

_HOMES = {
    "STRATEGIES": "strategies",
    "Budget": "budget",
    "Cluster": "engines.virtual.cluster",
    "Job": "training.job",
    "JoinedLearner": "engines.loop.joined",
    "Learner": "learner",
    "LoopStats": "engines.loop.joined",
    "Recipe": "runs.recipe.recipe",
    "Recogniser": "speech.recogniser",
    "Schedule": "budget",
    "StarlingError": "errors",
    "Ticket": "workload",
    "VirtualEngine": "engines.virtual.engine",
    "Workload": "workload",
    "join": "launch.joining",
    "load_recipe": "runs.recipe.recipe",
}

if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
    import_module("starling.launch.dynamo_on_demand").postpone_dynamo()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'starling' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"starling.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
