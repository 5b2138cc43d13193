"""Starling trains speech recognisers, and any other PyTorch model, with many learners at once.

Public names are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starling.budget import Budget as Budget
    from starling.budget import Schedule as Schedule
    from starling.comparing.compare import compare as compare
    from starling.comparing.table import Comparison as Comparison
    from starling.configuration import Config as Config
    from starling.engines.loop.joined import JoinedLearner as JoinedLearner
    from starling.engines.loop.joined import LoopStats as LoopStats
    from starling.engines.virtual.cluster import Cluster as Cluster
    from starling.engines.virtual.engine import VirtualEngine as VirtualEngine
    from starling.errors import StarlingError as StarlingError
    from starling.experiment.planning import profile as profile
    from starling.experiment.replay import Replayed as Replayed
    from starling.experiment.replay import replay as replay
    from starling.experiment.report import report as report
    from starling.experiment.simulate import LearnerStats as LearnerStats
    from starling.experiment.simulate import Simulated as Simulated
    from starling.experiment.simulate import simulate as simulate
    from starling.experiment.task import Task as Task
    from starling.experiment.task import TaskRecipe as TaskRecipe
    from starling.experiment.task import job_of as job_of
    from starling.experiment.train import Trained as Trained
    from starling.experiment.train import train as train
    from starling.launch.joining import attach as attach
    from starling.launch.joining import join as join
    from starling.launch.sharing import SharedBatches as SharedBatches
    from starling.launch.sharing import SharedSampler as SharedSampler
    from starling.learner import Handle as Handle
    from starling.learner import Learner as Learner
    from starling.predict.costs import Profile as Profile
    from starling.predict.plan import Plan as Plan
    from starling.predict.plan import plan as plan
    from starling.speech.recipe import Recipe as Recipe
    from starling.speech.recipe import load_recipe as load_recipe
    from starling.speech.recogniser import Recogniser as Recogniser
    from starling.speech.transcribing.files import load_model as load_model
    from starling.speech.transcribing.transcriber import Live as Live
    from starling.speech.transcribing.transcriber import Transcriber as Transcriber
    from starling.speech.transcribing.transcript import Segment as Segment
    from starling.speech.transcribing.transcript import Transcript as Transcript
    from starling.speech.transcribing.transcript import Update as Update
    from starling.speech.transcribing.transcript import Word as Word
    from starling.strategies import STRATEGIES as STRATEGIES
    from starling.strategies import Strategy as Strategy
    from starling.strategies.islands import Island as Island
    from starling.topology import Topology as Topology
    from starling.training.data import DataWorkload as DataWorkload
    from starling.training.job import Job as Job
    from starling.workload import Ticket as Ticket
    from starling.workload import Workload as Workload

_NAMES = {
    "budget": "Budget Schedule",
    "comparing.compare": "compare",
    "comparing.table": "Comparison",
    "configuration": "Config",
    "engines.loop.joined": "JoinedLearner LoopStats",
    "engines.virtual.cluster": "Cluster",
    "engines.virtual.engine": "VirtualEngine",
    "errors": "StarlingError",
    "experiment.train": "Trained train",
    "experiment.planning": "profile",
    "experiment.replay": "Replayed replay",
    "experiment.report": "report",
    "experiment.simulate": "LearnerStats Simulated simulate",
    "experiment.task": "Task TaskRecipe job_of",
    "launch.joining": "attach join",
    "launch.sharing": "SharedBatches SharedSampler",
    "learner": "Handle Learner",
    "predict.costs": "Profile",
    "predict.plan": "Plan plan",
    "speech.recipe": "Recipe load_recipe",
    "speech.recogniser": "Recogniser",
    "speech.transcribing.files": "load_model",
    "speech.transcribing.transcriber": "Live Transcriber",
    "speech.transcribing.transcript": "Segment Transcript Update Word",
    "strategies": "STRATEGIES Strategy",
    "strategies.islands": "Island",
    "topology": "Topology",
    "training.data": "DataWorkload",
    "training.job": "Job",
    "workload": "Ticket Workload",
}
"""Public names of each module."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)

_SPEECH = ("Live", "Recogniser", "Recipe", "Transcriber", "load_model", "load_recipe")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'starling' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name in _SPEECH:
        from starling.errors import require

        require("speech", f"starling.{name}")
    return getattr(import_module(f"starling.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
