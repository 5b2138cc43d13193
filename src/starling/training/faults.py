"""Injected faults: learners that die, pause, or compute non-finite gradients; network partitions; joiners."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, model_validator

from starling.configuration import Config

Name = Annotated[int, Field(ge=0)]
"""Which learner."""
AtStep = Annotated[int, Field(ge=1)]
"""The learner's own mini-batch, from 1. Counting restarts on resume, and continues after a membership change."""
AtSeconds = Annotated[float, Field(ge=0.0)]
"""When, on the engine's clock, counted from the beginning of the run."""
AtEvent = Annotated[int, Field(ge=1)]
"""At which event of the run, from 1; only the simulated clock counts them."""
_WAKE = "import os, signal, sys, time; time.sleep(float(sys.argv[2])); os.kill(int(sys.argv[1]), signal.SIGCONT)"


class _Placed(Config):
    """A fault that is placed at a time, at an event, or, where it has `at_step`, at a mini-batch."""

    at_seconds: AtSeconds | None = None
    at_event: AtEvent | None = None

    @model_validator(mode="after")
    def _is_placed_once(self) -> Self:
        places = [name for name in ("at_step", "at_seconds", "at_event") if name in type(self).model_fields]
        if sum(getattr(self, name) is not None for name in places) != 1:
            raise ValueError(f"give one of {', '.join(places[:-1])} and {places[-1]}")
        return self


class Kill(_Placed):
    """A learner that is killed, as by kill -9; with `at_step`, before it has computed that mini-batch."""

    kill: Name
    at_step: AtStep | None = None

    @property
    def learner(self) -> int:
        return self.kill


class Pause(_Placed):
    """A learner that pauses, as by SIGSTOP; with `at_step`, before it computes that mini-batch (default: its first)."""

    pause: Name
    seconds: float = Field(gt=0.0)
    at_step: AtStep | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_placed_first(cls, given: Any) -> Any:
        has_place = not isinstance(given, dict) or given.keys() & {"at_step", "at_seconds", "at_event"}
        return given if has_place else {**given, "at_step": 1}

    @property
    def learner(self) -> int:
        return self.pause


class Split(_Placed):
    """Learners that a network partition cuts off, from the others and the launcher, for a while. Simulated only."""

    split: tuple[Name, ...] = Field(min_length=1)
    seconds: float = Field(gt=0.0)

    @property
    def learner(self) -> int:
        """The last of them."""
        return max(self.split)


class Join(Config):
    """A learner that joins: a lost one returns, any other name is new."""

    join: Name
    at_seconds: AtSeconds

    @property
    def learner(self) -> int:
        return self.join


class NotFinite(Config):
    """A learner whose gradient of a mini-batch is not a number."""

    nan: Name
    at_step: AtStep

    @property
    def learner(self) -> int:
        return self.nan


_KINDS: Mapping[str, type[Config]] = {"kill": Kill, "pause": Pause, "nan": NotFinite, "split": Split, "join": Join}


def _kind(given: Any) -> str | None:
    """The tag of what a fault is given as: the key that says what happens, by the name of its class."""
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


class FaultsOf:
    """The faults of one learner, in the order of its mini-batches."""

    def __init__(self, faults: Sequence[Fault], learner: int) -> None:
        self._faults = [fault for fault in faults if not isinstance(fault, Split | Join) and fault.learner == learner]
        self._num_steps = 0

    def next(self) -> Sequence[Kill | Pause | NotFinite]:
        """The faults at the next mini-batch; call once for each."""
        self._num_steps += 1
        return [fault for fault in self._faults if fault.at_step == self._num_steps]


def problems(faults: Sequence[Fault], world: int) -> Iterator[str]:
    """One line for each fault of a learner that is not among `world` learners."""
    for place, fault in enumerate(faults):
        if not isinstance(fault, Join) and fault.learner >= world:
            yield f"faults.{place}: there is no learner {fault.learner} among {world}; the last is learner {world - 1}"


def only_simulated(faults: Sequence[Fault]) -> Iterator[str]:
    """One line for each fault that real processes cannot be given."""
    for place, fault in enumerate(faults):
        if isinstance(fault, Split):
            yield f"faults.{place}: a network is split by `starling simulate` only"
        elif isinstance(fault, Kill | Pause) and fault.at_step is None:
            yield f"faults.{place}: `starling train` places it by at_step; at_seconds and at_event are for simulations"


def kill_this_process() -> None:
    """End this process at once, as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_this_process(seconds: float) -> None:
    """Stop this process, with all its threads; another process wakes it after so many seconds."""
    waking = subprocess.Popen([sys.executable, "-I", "-S", "-c", _WAKE, str(os.getpid()), str(seconds)])
    os.kill(os.getpid(), signal.SIGSTOP)
    waking.wait()
