"""Starling trains speech recognisers, and any other PyTorch model, with many learners at once.

Public names are loaded on first use. In a learner process, torch's compiler is imported only if it is used.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starling.budget import Budget, Schedule
    from starling.comparing.api import compare
    from starling.comparing.table import Comparison
    from starling.configuration import Config
    from starling.engines.loop.joined import JoinedLearner, LoopStats
    from starling.engines.virtual.cluster import Cluster
    from starling.engines.virtual.engine import VirtualEngine
    from starling.errors import StarlingError
    from starling.experiment.any_job import Simulated, Trained, simulate, train
    from starling.experiment.profile import profile
    from starling.experiment.report import report
    from starling.experiment.task import Task, TaskRecipe, job_of
    from starling.launch.joining import attach, join
    from starling.launch.sharing import SharedBatches, SharedSampler
    from starling.learner import Handle, Learner
    from starling.predict.costs import Profile
    from starling.predict.plan import Plan, plan
    from starling.speech.recipe import Recipe, load_recipe
    from starling.speech.recogniser import Recogniser
    from starling.speech.transcribing.files import load_model
    from starling.speech.transcribing.transcriber import Live, Transcriber
    from starling.speech.transcribing.transcript import Segment, Transcript, Update, Word
    from starling.strategies import STRATEGIES, Strategy
    from starling.strategies.islands import Island
    from starling.topology import Topology
    from starling.training.data import DataWorkload
    from starling.training.job import Job
    from starling.workload import Ticket, Workload

__all__ = [
    "STRATEGIES",
    "Budget",
    "Cluster",
    "Comparison",
    "Config",
    "DataWorkload",
    "Handle",
    "Island",
    "Job",
    "JoinedLearner",
    "Learner",
    "Live",
    "LoopStats",
    "Plan",
    "Profile",
    "Recipe",
    "Recogniser",
    "Schedule",
    "Segment",
    "SharedBatches",
    "SharedSampler",
    "Simulated",
    "StarlingError",
    "Strategy",
    "Task",
    "TaskRecipe",
    "Ticket",
    "Topology",
    "Trained",
    "Transcriber",
    "Transcript",
    "Update",
    "VirtualEngine",
    "Word",
    "Workload",
    "attach",
    "compare",
    "job_of",
    "join",
    "load_model",
    "load_recipe",
    "plan",
    "profile",
    "report",
    "simulate",
    "train",
]

_HOMES = {
    "STRATEGIES": "strategies",
    "Budget": "budget",
    "Cluster": "engines.virtual.cluster",
    "Comparison": "comparing.table",
    "Config": "configuration",
    "DataWorkload": "training.data",
    "Handle": "learner",
    "Island": "strategies.islands",
    "Job": "training.job",
    "JoinedLearner": "engines.loop.joined",
    "Learner": "learner",
    "Live": "speech.transcribing.transcriber",
    "LoopStats": "engines.loop.joined",
    "Plan": "predict.plan",
    "Profile": "predict.costs",
    "Recipe": "speech.recipe",
    "Recogniser": "speech.recogniser",
    "Schedule": "budget",
    "Segment": "speech.transcribing.transcript",
    "SharedBatches": "launch.sharing",
    "SharedSampler": "launch.sharing",
    "Simulated": "experiment.any_job",
    "StarlingError": "errors",
    "Strategy": "strategies",
    "Task": "experiment.task",
    "TaskRecipe": "experiment.task",
    "Ticket": "workload",
    "Topology": "topology",
    "Trained": "experiment.any_job",
    "Transcriber": "speech.transcribing.transcriber",
    "Transcript": "speech.transcribing.transcript",
    "Update": "speech.transcribing.transcript",
    "VirtualEngine": "engines.virtual.engine",
    "Word": "speech.transcribing.transcript",
    "Workload": "workload",
    "attach": "launch.joining",
    "compare": "comparing.api",
    "job_of": "experiment.task",
    "join": "launch.joining",
    "load_model": "speech.transcribing.files",
    "load_recipe": "speech.recipe",
    "report": "experiment.report",
    "plan": "predict.plan",
    "profile": "experiment.profile",
    "simulate": "experiment.any_job",
    "train": "experiment.any_job",
}

_SPEECH = ("Live", "Recogniser", "Recipe", "Transcriber", "load_model", "load_recipe")

if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
    import_module("starling.launch.dynamo_on_demand").postpone_dynamo()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'starling' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name in _SPEECH:
        from starling.extras import require

        require("speech", f"starling.{name}")
    return getattr(import_module(f"starling.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
