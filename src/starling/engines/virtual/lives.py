"""All learners that ever lived in a virtual run."""

from collections.abc import Callable
from dataclasses import dataclass

import simpy

from starling.engines.virtual.cluster import Cluster, ComputeTimes
from starling.training.faults import faults_of
from starling.training.job import Job
from starling.training.stragglers import Delays
from starling.training.succession import Life


@dataclass(kw_only=True)
class VirtualLife(Life):
    """A learner's life on the simulated clock."""

    times: ComputeTimes
    still_until: float = 0.0
    """The simulated second until which the learner is paused."""
    death: str = ""
    """Why it is dead."""

    @property
    def is_dead(self) -> bool:
        return bool(self.death)


class Lives:
    """The lives of all learners, by name; a restarted learner has a new life."""

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        environment: simpy.Environment,
        times: Callable[[int], ComputeTimes] | None = None,
    ) -> None:
        self._times = times or (lambda name: ComputeTimes(cluster.compute, job.seed, name))
        self._job, self._environment = job, environment
        self.by_name: dict[int, VirtualLife] = {}

    def begin(self, name: int) -> VirtualLife:
        """Start or restart a learner; only the learners that begin with the run suffer injected faults of their own."""
        job, is_first = self._job, self._environment.now == 0.0
        life = self.by_name[name] = VirtualLife(
            name=name,
            delays=Delays(job.stragglers, job.seed, name),
            faults=faults_of(job.faults if is_first else (), name),
            times=self._times(name),
        )
        return life

    def living(self) -> tuple[int, ...]:
        """The names of the living learners, in order."""
        return tuple(sorted(name for name, life in self.by_name.items() if not life.is_dead))
