"""The process of one learner that `starling.train` started: `python -m starling.experiment.job_process FILE`."""

import sys
from pathlib import Path

from starling.experiment.any_job import GivenJob
from starling.experiment.folder import ExperimentFolder
from starling.experiment.learning import learn
from starling.experiment.packing import unpack
from starling.launch.link import Link, reported_errors
from starling.launch.rendezvous import find_place


def main(file: Path) -> None:
    """Train as a learner of the job that the launcher has packed into `file`."""
    link = Link.from_environment()
    with reported_errors(link):
        job, run = unpack(file.read_bytes())
        if link is not None and run.launch.kind == "local":  # elsewhere a lost connection does not mean a dead launcher
            link.leftovers.append(file.parent)
        learn(GivenJob(job), run, ExperimentFolder(run.folder), find_place(run.engine.timeout_seconds), link)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
