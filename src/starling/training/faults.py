"""Injected faults: killed and paused learners, non-finite gradients, network partitions; and injected joins."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, repeat
from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, model_validator

from starling.configuration import Config

Name = Annotated[int, Field(ge=0)]
"""The name of a learner."""
AtStep = Annotated[int, Field(ge=1)]
"""The number of the learner's own mini-batch, from 1. It restarts on resume, but not after a membership change."""
AtSeconds = Annotated[float, Field(ge=0.0)]
"""Seconds since the beginning of the run, on the engine's clock."""
AtEvent = Annotated[int, Field(ge=1)]
"""The number of an event of the run, from 1; simulations only."""
_WAKE = "import os, signal, sys, time; time.sleep(float(sys.argv[2])); os.kill(int(sys.argv[1]), signal.SIGCONT)"


class _OfLearner(Config):
    """A fault of one learner. The key that names the kind of fault contains the name of the learner."""

    @property
    def learner(self) -> int:
        """The learner to which the fault happens. For a partition, it is the separated learner with the largest
        name."""
        name = next(getattr(self, key) for key in _KINDS if hasattr(self, key))
        return max(name) if isinstance(name, tuple) else int(name)


class _Placed(_OfLearner):
    """A fault at a time, at an event or, if its class has `at_step`, at a mini-batch."""

    at_seconds: AtSeconds | None = None
    """Time of the fault in seconds since the beginning of the run."""
    at_event: AtEvent | None = None
    """Number of the event of the run at which the fault happens, from 1; simulations only."""

    @model_validator(mode="after")
    def _is_placed_once(self) -> Self:
        places = [name for name in ("at_step", "at_seconds", "at_event") if name in type(self).model_fields]
        if sum(getattr(self, name) is not None for name in places) != 1:
            raise ValueError(f"give exactly one of {', '.join(places[:-1])} and {places[-1]}")
        return self


class Kill(_Placed):
    """Kills a learner, as kill -9 does; with `at_step`, before it computes that mini-batch."""

    kill: Name
    """The learner to kill."""
    at_step: AtStep | None = None
    """Number of the learner's own mini-batch at which the fault happens, from 1."""


class Pause(_Placed):
    """Pauses a learner, as SIGSTOP does. With `at_step`, the pause comes before the learner computes that mini-batch;
    if neither a time nor a place is given, before its first."""

    pause: Name
    """The learner to pause."""
    seconds: float = Field(gt=0.0)
    """Length of the pause."""
    at_step: AtStep | None = None
    """Number of the learner's own mini-batch at which the fault happens, from 1."""

    @model_validator(mode="before")
    @classmethod
    def _is_placed_first(cls, given: Any) -> Any:
        has_place = not isinstance(given, dict) or given.keys() & {"at_step", "at_seconds", "at_event"}
        return given if has_place else {**given, "at_step": 1}


class Split(_Placed):
    """A network partition that separates learners from the others and the launcher for `seconds`. Simulated only."""

    split: tuple[Name, ...] = Field(min_length=1)
    """The learners to separate from the others."""
    seconds: float = Field(gt=0.0)
    """Length of the partition."""


class Join(_OfLearner):
    """Adds a learner: restarts a lost one, or starts a new one if the name is new."""

    join: Name
    """The learner that joins."""
    at_seconds: AtSeconds
    """Time at which the learner is started, in seconds since the beginning of the run."""


class NotFinite(_OfLearner):
    """Makes a learner's gradient of one mini-batch NaN."""

    nan: Name
    """The learner whose gradient is spoilt."""
    at_step: AtStep
    """Number of the learner's own mini-batch at which the fault happens, from 1."""


_KINDS: Mapping[str, type[Config]] = {"kill": Kill, "pause": Pause, "nan": NotFinite, "split": Split, "join": Join}


def _kind(given: Any) -> str | None:
    """Return the name of a fault's class, given the key that names the kind of fault."""
    for key, kind in _KINDS.items():
        if isinstance(given, kind) or (isinstance(given, dict) and key in given):
            return kind.__name__
    return None


Fault = Annotated[
    Annotated[Kill, Tag("Kill")]
    | Annotated[Pause, Tag("Pause")]
    | Annotated[NotFinite, Tag("NotFinite")]
    | Annotated[Split, Tag("Split")]
    | Annotated[Join, Tag("Join")],
    Discriminator(_kind, "no_fault", f"must be a mapping with one of the keys {', '.join(_KINDS)}"),
]


def faults_of(faults: Sequence[Fault], learner: int) -> Iterator[Sequence[Kill | Pause | NotFinite]]:
    """Yield the faults at each mini-batch of a learner, in the order in which they are given."""
    own = [fault for fault in faults if not isinstance(fault, Split | Join) and fault.learner == learner]
    return ([fault for fault in own if fault.at_step == step] for step in count(1)) if own else repeat(())


def only_simulated(faults: Sequence[Fault]) -> Iterator[str]:
    """Yield one line for each fault that only simulations support."""
    for place, fault in enumerate(faults):
        if isinstance(fault, Split):
            yield f"faults.{place}: only `starling simulate` supports split"
        elif isinstance(fault, Kill | Pause) and fault.at_event is not None:
            yield f"faults.{place}: `starling train` needs at_step or at_seconds; at_event is for simulations"


def at_times(faults: Sequence[Fault]) -> list[Kill | Pause | Join]:
    """Return the faults that the launcher of real learners causes at given times, in order of time."""
    timed = [each for each in faults if isinstance(each, Kill | Pause | Join) and each.at_seconds is not None]
    return sorted(timed, key=lambda fault: fault.at_seconds or 0.0)


def kill_this_process() -> None:
    """End this process immediately, as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_this_process(seconds: float) -> None:
    """Stop this process, with all its threads; another process resumes it after `seconds`."""
    waking = subprocess.Popen([sys.executable, "-I", "-S", "-c", _WAKE, str(os.getpid()), str(seconds)])
    os.kill(os.getpid(), signal.SIGSTOP)
    waking.wait()
