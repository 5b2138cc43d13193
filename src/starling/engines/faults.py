"""Faults on purpose, for tests of one's own: learners that die, stand still, or compute nonsense."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

from starling.configuration import Config

Name = Annotated[int, Field(ge=0)]
"""Which learner."""
AtStep = Annotated[int, Field(ge=1)]
"""At which of its own mini-batches, from 1; a resumed run counts anew, a run that lost learners goes on counting."""
_WAKE = "import os, signal, sys, time; time.sleep(float(sys.argv[2])); os.kill(int(sys.argv[1]), signal.SIGCONT)"


class Kill(Config):
    """A learner that is killed before it has computed a mini-batch, as by kill -9."""

    kill: Name
    at_step: AtStep

    @property
    def learner(self) -> int:
        return self.kill


class Pause(Config):
    """A learner whose process stands still, as by SIGSTOP, before it computes a mini-batch."""

    pause: Name
    at_step: AtStep = 1
    seconds: float = Field(gt=0.0)

    @property
    def learner(self) -> int:
        return self.pause


class NotFinite(Config):
    """A learner whose gradient of a mini-batch is not a number."""

    nan: Name
    at_step: AtStep

    @property
    def learner(self) -> int:
        return self.nan


Fault = Kill | Pause | NotFinite


class FaultsOf:
    """The faults of one learner, in the order of its mini-batches."""

    def __init__(self, faults: Sequence[Fault], learner: int) -> None:
        self._faults = [fault for fault in faults if fault.learner == learner]
        self._num_steps = 0

    def next(self) -> Sequence[Fault]:
        """What happens at the next mini-batch; to be asked once for each."""
        self._num_steps += 1
        return [fault for fault in self._faults if fault.at_step == self._num_steps]


def problems(faults: Sequence[Fault], world: int) -> Iterator[str]:
    """One line for each fault of a learner that is not among `world` learners."""
    for place, fault in enumerate(faults):
        if fault.learner >= world:
            yield f"faults.{place}: there is no learner {fault.learner} among {world}; the last is learner {world - 1}"


def kill_this_process() -> None:
    """End without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_this_process(seconds: float) -> None:
    """Stand still, with all threads, until another process has waited for so long."""
    waking = subprocess.Popen([sys.executable, "-I", "-S", "-c", _WAKE, str(os.getpid()), str(seconds)])
    os.kill(os.getpid(), signal.SIGSTOP)
    waking.wait()
