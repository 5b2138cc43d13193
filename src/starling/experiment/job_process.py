"""The process of one learner of a job: `python -m starling.experiment.job_process JOB [CHOICE]`.

It trains for `starling.train`. With CHOICE, it measures for `strategy: auto`, and learner 0 writes the choice.
"""

import sys
from pathlib import Path

from starling.experiment.auto import measured_choice
from starling.experiment.launching import unpack
from starling.experiment.learning import learn
from starling.experiment.train import GivenJob
from starling.launch.link import Link, reported_errors
from starling.launch.rendezvous import find_place


def main(file: Path, choice: Path | None = None) -> None:
    """Train, or measure, as a learner of the job that the launcher has packed into `file`."""
    link = Link.from_environment()
    with reported_errors(link):
        job, run = unpack(file.read_bytes())
        if link is not None and run.launch.kind == "local":  # elsewhere a lost connection does not mean a dead launcher
            link.leftovers.append(file.parent)
        place = find_place(run.engine.timeout_seconds)
        if choice is None:
            learn(GivenJob(job), run, place, link)
            return
        chosen = measured_choice(run, place, job)
        if place.rank == 0:
            choice.write_text(chosen.model_dump_json(), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
