"""The machines on which a run starts its learners, from its `launch` section."""

from starling.experiment.folder import ExperimentFolder
from starling.launch.on_ray import RayMachines, connected
from starling.launch.process import Machines
from starling.recipe.run import RunConfig
from starling.reporting.progress import Say


def check_machines(run: RunConfig) -> None:
    """Raise the error of a cluster that a run needs and cannot reach, before the run prepares anything."""
    if run.launch.kind == "ray":
        with connected(run.launch.address):
            pass


def machines_of(run: RunConfig, say: Say) -> Machines | None:
    """Where the learners run; None: on this machine."""
    if run.launch.kind == "local":
        return None
    resources = {"CPU": 1.0} | ({"GPU": 1.0} if run.engine.device == "cuda" else {}) | run.launch.resources
    size = run.super_learner_size
    return RayMachines(run.launch.address, run.launch.learners_per_node or size, size, resources, say)


def shared_folder(run: RunConfig, folder: ExperimentFolder) -> str | None:
    """The parent of temporary folders that learners read; None: the system's usual one."""
    return None if run.launch.kind == "local" else str(folder.path)
