"""Every message between a launcher, its learners, and the commands that look at a run or change it.

Learners and launcher talk over a socket, a JSON object a line (`launch/link.py`); `starling join` and the launcher
exchange files (`launch/requests.py`); `starling status` reads a file that the launcher writes. All of it is one of the
frozen classes below. `encode` and the `decode_…` functions are the only places where they become JSON and come back;
whatever does not fit its class, by a name, a type or a missing field, is a `ProtocolError`.

The liveness protocol: a learner sends a `Heartbeat` every `HEARTBEAT_EVERY` seconds from its start to its end,
whatever else it does. It says `Ready` (a joiner only), `Arrived` and `Entered` as it moves into a membership, `Ended`
when its training is done, and `Failed` if an error ends it. `launch/roster.py` derives the state of a learner from
these messages, from their absence, and from the end of its process.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Annotated, Literal, TypeVar

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from starling.engines.processes.stalls import Stall
from starling.errors import ProtocolError

Seconds = float
_STRICT = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")
_SHOWN = 120
"""Bytes of a message that an error about it shows."""


class _Message:
    __pydantic_config__ = _STRICT


# From a learner to its launcher


@dataclass(frozen=True)
class Heartbeat(_Message):
    """The learner's process runs."""

    num_steps: int | None = None
    """Mini-batches that this process has computed; None before it trains."""
    stall: Stall | None = None
    """What it waits for, if it has waited for long."""
    _: KW_ONLY
    kind: Literal["heartbeat"] = "heartbeat"


@dataclass(frozen=True)
class Ready(_Message):
    """A joiner has loaded all it needs and waits for a membership with it."""

    _: KW_ONLY
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True)
class Arrived(_Message):
    """The learner waits for the other members of a membership."""

    generation: int
    _: KW_ONLY
    kind: Literal["arrived"] = "arrived"


@dataclass(frozen=True)
class Entered(_Message):
    """The learner has met the other members, and trains."""

    generation: int
    _: KW_ONLY
    kind: Literal["entered"] = "entered"


@dataclass(frozen=True)
class CanStop(_Message):
    """From now on the learner can save and end together with the others when it is asked to stop."""

    _: KW_ONLY
    kind: Literal["can-stop"] = "can-stop"


@dataclass(frozen=True)
class Signalled(_Message):
    """The learner itself received a signal to stop."""

    signal_number: int
    _: KW_ONLY
    kind: Literal["signalled"] = "signalled"


@dataclass(frozen=True)
class Failed(_Message):
    """An error ends the learner."""

    error: str
    """The name of its class."""
    text: str
    _: KW_ONLY
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True)
class Ended(_Message):
    """The learner's training is done."""

    num_steps: int
    _: KW_ONLY
    kind: Literal["ended"] = "ended"


@dataclass(frozen=True)
class Snapshot(_Message):
    """One learner's training since its last snapshot."""

    learner_id: int
    world: int
    epoch: int
    batch: int
    """The mini-batch of the epoch that was computed last, from 0, counted over all learners."""
    num_batches: int
    """Mini-batches in the epoch."""
    step: int
    """Mini-batches before that one since the beginning of the run, of all learners."""
    loss: float
    """Mean over the stretch, by frames."""
    num_frames: int
    """Frames in the stretch."""
    running_loss: float
    """Mean over the epoch so far, by frames."""
    learning_rate: float
    audio_rate: float
    """Seconds of audio trained on per second of the engine's clock; 0 when no time has passed."""
    fraction: float
    """The share of the budget that is spent."""
    minutes: float
    """Time since the beginning of the run, on the engine's clock."""
    _: KW_ONLY
    kind: Literal["snapshot"] = "snapshot"

    @property
    def minutes_left(self) -> float | None:
        """What the rest of the budget takes at this pace; None before anything is spent."""
        if self.fraction <= 0.0 or self.minutes <= 0.0:
            return None
        return self.minutes * (1.0 - self.fraction) / self.fraction

    @property
    def doing(self) -> str:
        """What the learner does, in words."""
        return f"computing batch {self.batch + 1} of epoch {self.epoch + 1}"


@dataclass(frozen=True)
class EpochEnd(_Message):
    """One learner's part of an epoch."""

    learner_id: int
    world: int
    epoch: int
    num_steps: int
    seconds: Seconds
    computing: Seconds
    waiting_for_data: Seconds
    waiting_for_peers: Seconds
    step: int = 0
    """Mini-batches of the run before the epoch's end, of all learners."""
    num_rounds: int = 0
    """Averaging rounds of the epoch."""
    bytes_sent: int = 0
    """To other learners."""
    staleness: tuple[int, ...] = ()
    """How many gradients had a staleness of 0, 1, 2, …; the last place counts all beyond it, too."""
    mean_staleness: float = 0.0
    largest_staleness: int = 0
    consensus_distance: float | None = None
    """(1/L) sum_l |w_l - mean|^2 at the epoch's end, where it is known."""
    num_not_finite: int = 0
    """Gradients that were left out because they were not finite."""
    loss: float | None = None
    """Mean over the learner's frames of the epoch; None without a frame."""
    num_frames: int = 0
    learning_rate: float | None = None
    """Of the last gradient."""
    _: KW_ONLY
    kind: Literal["epoch"] = "epoch"

    @property
    def rounds_per_gradient(self) -> float:
        """Averaging rounds for each gradient; 0 without a gradient."""
        return self.num_rounds / self.num_steps if self.num_steps else 0.0

    def share(self, seconds: Seconds) -> float:
        """`seconds` in per cent of the learner's time in the epoch."""
        return 100.0 * seconds / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def doing(self) -> str:
        """What the learner does, in words."""
        return f"saving after epoch {self.epoch + 1}"


@dataclass(frozen=True)
class Saved(_Message):
    """A checkpoint is complete."""

    folder: str
    moment: Literal["epoch", "barrier", "end"]
    """The end of an epoch, a checkpoint barrier inside one, or the end of the run."""
    consensus_distance: float | None = None
    _: KW_ONLY
    kind: Literal["saved"] = "saved"


@dataclass(frozen=True)
class ModelSaved(_Message):
    """What the consensus model is made from is complete: the launcher may score it."""

    folder: str
    _: KW_ONLY
    kind: Literal["model-saved"] = "model-saved"


@dataclass(frozen=True)
class Said(_Message):
    """A line for the screen."""

    line: str
    _: KW_ONLY
    kind: Literal["said"] = "said"


@dataclass(frozen=True)
class Activity(_Message):
    """What a learner's program does, and anything else that it reports to the program that started it."""

    doing: str = ""
    """Empty: still the same."""
    values: dict[str, JsonValue] = field(default_factory=dict)
    """For `on_message` of `launch`; Starling reads nothing from it."""
    _: KW_ONLY
    kind: Literal["activity"] = "activity"


LearnerMessage = (
    Heartbeat
    | Ready
    | Arrived
    | Entered
    | CanStop
    | Signalled
    | Failed
    | Ended
    | Snapshot
    | EpochEnd
    | Saved
    | ModelSaved
    | Said
    | Activity
)


# From a launcher to its learners


@dataclass(frozen=True)
class NewMembership(_Message):
    """The learners that train from now on."""

    generation: int
    members: tuple[int, ...]
    """Their learner ids. A learner's rank in this membership is its place here."""
    reason: str = ""
    """What changed, in words."""
    _: KW_ONLY
    kind: Literal["membership"] = "membership"


@dataclass(frozen=True)
class Stop(_Message):
    """Save together with the others, and end."""

    signal_number: int
    _: KW_ONLY
    kind: Literal["stop"] = "stop"


LauncherMessage = NewMembership | Stop


# Between `starling join` and a launcher


@dataclass(frozen=True)
class JoinRequest(_Message):
    """More learners are asked for."""

    learners: int
    id: str = ""
    """Stands in the name of the file."""


@dataclass(frozen=True)
class JoinAnswer(_Message):
    """What became of a request."""

    refused: str = ""
    """Why no learner was started; empty if some were."""
    joined: tuple[int, ...] = ()
    """The ids of those that train."""
    failed: tuple[str, ...] = ()
    """What became of the others."""
    learners: int = 0
    """How many train now."""


# From a launcher to `starling status`


@dataclass(frozen=True)
class LearnerStatus(_Message):
    """One learner. Ages are seconds before the status was written; None: never."""

    learner_id: int
    rank: int | None
    """In the newest membership; None if it is not a member."""
    state: str
    num_steps: int
    loss: float | None
    heard: Seconds | None
    log: str
    """Inside the experiment's folder."""


@dataclass(frozen=True)
class Status(_Message):
    """A run at one moment. Times are seconds since the epoch."""

    name: str
    strategy: str
    stage: Literal["training", "scoring", "ended"]
    began: float
    written: float
    pid: int
    """Of the launcher."""
    generation: int
    """Of the newest membership that learners train in; -1 before the first."""
    learners: tuple[LearnerStatus, ...]
    losses: tuple[str, ...]
    """A reason for each learner that was lost."""
    saved: str
    """The newest checkpoint, or nothing."""
    saved_age: Seconds
    exit_code: int | None
    message: str
    """How it ended."""
    format: Literal[2] = 2


T = TypeVar("T")


@cache  # building it takes 30 ms, which a process that sends no message need not pay
def _from_learner() -> TypeAdapter[LearnerMessage]:
    return TypeAdapter(Annotated[LearnerMessage, Field(discriminator="kind")], config=_STRICT)


@cache
def _from_launcher() -> TypeAdapter[LauncherMessage]:
    return TypeAdapter(Annotated[LauncherMessage, Field(discriminator="kind")], config=_STRICT)


@cache
def _request() -> TypeAdapter[JoinRequest]:
    return TypeAdapter(JoinRequest)


@cache
def _answer() -> TypeAdapter[JoinAnswer]:
    return TypeAdapter(JoinAnswer)


@cache
def _status() -> TypeAdapter[Status]:
    return TypeAdapter(Status)


def encode(message: LearnerMessage | LauncherMessage) -> bytes:
    """A message as one line of JSON."""
    if isinstance(message, NewMembership | Stop):
        return _from_launcher().dump_json(message) + b"\n"
    return _from_learner().dump_json(message) + b"\n"


def encode_file(content: JoinRequest | JoinAnswer | Status) -> str:
    """The content of a file that others read."""
    match content:
        case Status():
            text = _status().dump_json(content, indent=1)
        case JoinRequest():
            text = _request().dump_json(content)
        case JoinAnswer():
            text = _answer().dump_json(content)
    return text.decode() + "\n"


def decode_from_learner(line: bytes, learner_id: int) -> LearnerMessage:
    """What a learner sent. Raises ProtocolError."""
    return _decode(_from_learner(), line, f"learner {learner_id} sent a message that this version does not understand")


def decode_from_launcher(line: bytes) -> LauncherMessage:
    """What the launcher sent. Raises ProtocolError."""
    return _decode(_from_launcher(), line, "the launcher sent a message that this version does not understand")


def decode_request(content: bytes) -> JoinRequest:
    """Raises ProtocolError."""
    return _decode(_request(), content, "not a request for learners")


def decode_answer(content: bytes) -> JoinAnswer:
    """Raises ProtocolError."""
    return _decode(_answer(), content, "not the answer to a request for learners")


def decode_status(content: bytes) -> Status:
    """Raises ProtocolError."""
    return _decode(_status(), content, "not the status of a run of this version")


def values_of(message: LearnerMessage) -> Mapping[str, JsonValue]:
    """What a learner's program reported of its own; nothing where the message is one of Starling's."""
    return message.values if isinstance(message, Activity) else {}


def _decode(adapter: TypeAdapter[T], content: bytes, what: str) -> T:
    try:
        return adapter.validate_json(content)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = next((each for each in errors if each["loc"] == ("format",)), errors[0])  # explains all others
        where = ".".join(map(str, first["loc"]))
        shown = repr(content[:_SHOWN])[1:] + ("…" if len(content) > _SHOWN else "")
        raise ProtocolError(f"{what}: {where + ': ' if where else ''}{first['msg']}; it reads {shown}") from error
