"""All messages between a launcher, its learners, and the commands that inspect or change a run.

Learners and launcher communicate over a socket, one JSON object per line (`launch/link.py`); `starling join` and the
launcher exchange files (`launch/joiners.py`); `starling status` reads a file that the launcher writes. Each message is
one of the frozen classes below. Only the `encode…` and `decode_…` functions convert them to and from
JSON. An unknown or missing field or a wrong type is a `ProtocolError`.

The liveness protocol: a learner sends a `Heartbeat` every `HEARTBEAT_EVERY` seconds as long as it runs. It sends
`Reached` as it moves into a membership, `Ended` when its training is done, and `Failed` if an error ends it.
`launch/roster.py` derives the state of a learner from these messages, from their absence, and from the end of its
process.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from starling.engines.processes.stalls import Stall
from starling.errors import ProtocolError
from starling.training.membership import Membership, Stage

Seconds = float
_STRICT = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")
_NOT_KNOWN = "this version does not understand"
_SHOWN = 120
"""Number of bytes of an invalid message that its error shows."""


class _Message:
    __pydantic_config__ = _STRICT

    def __init_subclass__(cls, kind: str = "") -> None:
        """Add a last field, `kind`, to a message that is sent over a socket. The other end uses it to recognise the
        class of the message."""
        if kind:
            cls.__annotations__["kind"] = Literal[kind]
            cls.kind = field(default=kind, kw_only=True)  # type: ignore[attr-defined]


class LearnerMessage(_Message):
    """A message from a learner to its launcher."""


class LauncherMessage(_Message):
    """A message from a launcher to its learners."""


# From a learner to its launcher


@dataclass(frozen=True)
class Heartbeat(LearnerMessage, kind="heartbeat"):
    """The learner's process is running."""

    num_steps: int | None = None
    """Number of mini-batches that this process has computed; None before it trains."""
    stall: Stall | None = None
    """Current wait of the learner, if it is a long one."""
    num_unshared: float = 0.0
    """Number of the learner's mini-batches whose effect would be lost with it, because no other learner has it."""


@dataclass(frozen=True)
class Hello(LearnerMessage, kind="hello"):
    """The first message over a new connection to the launcher or the coordinator."""

    who: tuple[str, ...]
    """Identity of the sender, and anything that the other side must know about it."""
    challenge: str
    """Random number with which the other side proves that it knows the run token."""
    proof: str
    """Proof that the sender knows the run token, computed over the random number of the other side."""


@dataclass(frozen=True)
class Reached(LearnerMessage, kind="reached"):
    """The learner has reached a stage on its way into a membership."""

    stage: Stage
    """Stage on the way. ready: the learner waits for a membership that includes it; arrived: the learner waits for the
    other members; entered: all members have met, and the learner trains."""
    generation: int
    """Generation of the membership; -1 if the learner waits for its first one."""


@dataclass(frozen=True)
class CanStop(LearnerMessage, kind="can-stop"):
    """The learner is now able to save and end together with the others on a stop request."""


@dataclass(frozen=True)
class Signalled(LearnerMessage, kind="signalled"):
    """The learner itself received a signal to stop."""

    signal_number: int


@dataclass(frozen=True)
class Failed(LearnerMessage, kind="failed"):
    """An error ends the learner."""

    error: str
    """Name of the exception's class."""
    text: str


@dataclass(frozen=True)
class Ended(LearnerMessage, kind="ended"):
    """The learner's training is done."""

    num_steps: int


@dataclass
class Stretch:
    """The work of one learner during some time, or of several learners or stretches together, whose numbers are sums.

    A loss that is not finite is excluded, and counted elsewhere. `end` is the time of training since the beginning of
    the run.
    """

    learner: int = -1
    end: Seconds = 0.0
    seconds: Seconds = 0.0
    """Duration of the stretch."""
    step: int = -1
    """Index in the run of the last mini-batch, from 0; all learners share the numbering."""
    batches: int = 0
    examples: int = 0
    frames: int = 0
    losses: float = 0.0
    """Sum of losses times frames."""
    audio: Seconds = 0.0
    computing: Seconds = 0.0
    """Time spent on gradients and steps."""
    waiting_for_data: Seconds = 0.0
    waiting_for_peers: Seconds = 0.0
    stopped: Seconds = 0.0
    """Time for which the process was stopped; it is in none of the other times."""
    rounds: int = 0
    """Number of averaging rounds; this and the next three fields are counted when an epoch ends."""
    bytes_sent: int = 0
    """Number of bytes sent to other learners."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of gradients by staleness."""
    num_not_finite: int = 0
    """Number of gradients that were skipped because they were not finite."""
    # a further field is summed, unless `_SUMMED` leaves it out

    def add(self, other: "Stretch") -> None:
        """Add another stretch to this one."""
        own, more = vars(self), vars(other)
        for name in _SUMMED:
            own[name] = own[name] + more[name]  # not in place, because copies share the counter
        self.learner, self.end, self.step = other.learner, max(self.end, other.end), max(self.step, other.step)

    def since(self, before: "Stretch") -> "Stretch":
        """Return the work that was added after the state `before` of this stretch."""
        own, less = vars(self), vars(before)
        more: dict[str, Any] = {name: own[name] - less[name] for name in _SUMMED}
        return Stretch(self.learner, self.end, step=self.step, **more)

    @property
    def begin(self) -> Seconds:
        """The time at which the stretch began. It is meaningful only for a stretch of a single learner."""
        return self.end - self.seconds

    @property
    def loss(self) -> float:
        """The mean of the mini-batches' losses, weighted by their frames; NaN without frames."""
        return self.losses / self.frames if self.frames else math.nan

    @property
    def audio_rate(self) -> float:
        """Seconds of audio trained on per second; 0 when no time has passed."""
        return self.audio / self.seconds if self.seconds > 0.0 else 0.0


_SUMMED = tuple(each.name for each in fields(Stretch) if each.name not in ("learner", "end", "step"))


@dataclass(frozen=True)
class Progress(LearnerMessage, kind="progress"):
    """A learner's progress. The learner sends it from time to time, and at the end of each epoch."""

    learner_id: int
    new: Stretch
    """Work since the learner's previous progress message. It has no frames if only time has passed."""
    so_far: Stretch
    """Work in the epoch so far."""
    epoch: int = 0
    batch: int = -1
    """Index in the epoch, from 0, of the mini-batch that was computed last; all learners share the numbering."""
    num_batches: int = 0
    """Number of mini-batches in the epoch."""
    learning_rate: float | None = None
    """Learning rate of the last gradient; None before the first."""
    fraction: float = 0.0
    """Spent fraction of the budget."""
    ended_at: int | None = None
    """Number of mini-batches that all learners computed from the start of the run to the end of the epoch; None while
    the epoch is under way."""
    left_after: int | None = None
    """Number of mini-batches of the epoch that all learners computed, if the run ended before the epoch did."""
    consensus_distance: float | None = None
    """(1/L) sum_l |w_l - mean|^2 at the epoch's end; None if unknown."""


@dataclass(frozen=True)
class Saved(LearnerMessage, kind="saved"):
    """A checkpoint is complete."""

    folder: str
    moment: Literal["epoch", "barrier", "end"]
    """Moment of the save: the end of an epoch, a checkpoint barrier inside one, or the end of the run."""
    consensus_distance: float | None = None


@dataclass(frozen=True)
class ModelSaved(LearnerMessage, kind="model-saved"):
    """The files from which the consensus model is computed are complete, so that the launcher may score it."""

    folder: str


@dataclass(frozen=True)
class Said(LearnerMessage, kind="said"):
    """A line that the launcher prints."""

    line: str


@dataclass(frozen=True)
class Activity(LearnerMessage, kind="activity"):
    """The activity of a learner's program, and values that it reports to the program that called `launch`."""

    doing: str = ""
    """Activity as text; empty if it is unchanged."""
    values: dict[str, JsonValue] = field(default_factory=dict)
    """Values that are passed to `on_message` of `launch`. Starling itself ignores them."""


# From a launcher to its learners


@dataclass(frozen=True)
class NewMembership(LauncherMessage, kind="membership"):
    """A new membership replaces the present one."""

    membership: Membership


@dataclass(frozen=True)
class Stop(LauncherMessage, kind="stop"):
    """Save a checkpoint together with the others, and end."""

    signal_number: int


@dataclass(frozen=True)
class Greeted(LauncherMessage, kind="greeted"):
    """The answer to a `Hello` message."""

    refused: str = ""
    """Reason why the sender is refused; empty if it is admitted."""
    proof: str = ""
    """Proof that the other side knows the run token."""


# Between `starling join` and a launcher


@dataclass(frozen=True)
class JoinRequest(_Message):
    """A request for more learners."""

    learners: int
    """Number of learners to add."""
    id: str = ""
    """Identifier that is part of the file's name."""


@dataclass(frozen=True)
class JoinAnswer(_Message):
    """The outcome of a join request."""

    refused: str = ""
    """Reason why the request was refused; empty if it was granted."""
    joined: tuple[int, ...] = ()
    """Ids of the learners that joined."""
    failed: tuple[str, ...] = ()
    """Reason why each of the other learners did not join."""
    learners: int = 0
    """Number of learners that train now."""


# From a launcher to `starling status`


@dataclass(frozen=True)
class LearnerStatus(_Message):
    """The status of one learner."""

    learner_id: int
    rank: int | None
    """Rank of the learner in the newest membership; None if it is not a member."""
    state: str
    """State or activity of the learner as text."""
    num_steps: int
    loss: float | None
    """Newest training loss that the learner reported."""
    heard: Seconds | None
    """Time since the learner's last message; None before the first."""
    log: str
    """Path of the learner's log, relative to the experiment's folder."""
    node: str = ""
    """Node of the cluster on which the learner runs; empty on the launcher's machine, and before the learner has a
    node."""


@dataclass(frozen=True)
class Status(_Message):
    """The state of a run. `began` and `written` are Unix timestamps."""

    name: str
    strategy: str
    stage: Literal["training", "scoring", "ended"]
    began: float
    written: float
    pid: int
    """Process id of the launcher."""
    generation: int
    """Generation of the newest membership that a learner has entered; -1 before the first."""
    learners: tuple[LearnerStatus, ...]
    losses: tuple[str, ...]
    """Reason of the loss of each lost learner."""
    saved: str
    """Newest checkpoint of this run; empty if there is none."""
    saved_age: Seconds
    """Time since the newest checkpoint was completed."""
    exit_code: int | None
    """Exit code of the run; None until it has ended."""
    message: str
    """Outcome of the run as text; empty until it has ended."""
    goodput: str = ""
    """The goodput so far, as text; empty before work has been reported."""
    machine: str = ""
    """Name of the launcher's machine; empty in files that earlier versions wrote."""
    format: Literal[2] = 2


MessageT = TypeVar("MessageT", bound=_Message)
FileT = TypeVar("FileT", JoinRequest, JoinAnswer, Status)
_FILES = {
    JoinRequest: "a request for learners",
    JoinAnswer: "the answer to a request for learners",
    Status: "the status of a run of this version",
}


@cache  # building the adapter takes 30 ms, which only processes that send messages should spend
def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind in _FILES:
        return TypeAdapter(kind)
    either: Any = reduce(or_, kind.__subclasses__())
    return TypeAdapter(Annotated[either, Field(discriminator="kind")], config=_STRICT)


def encode(message: LearnerMessage | LauncherMessage) -> bytes:
    """Encode a message as one line of JSON."""
    return _adapter(type(message).__base__).dump_json(message) + b"\n"


def decode_from_learner(line: bytes, learner_id: int) -> LearnerMessage:
    """Decode a line from a learner. Raises `ProtocolError` for an invalid line."""
    return _decode(LearnerMessage, line, f"learner {learner_id} sent a message that {_NOT_KNOWN}")


def decode_from_launcher(line: bytes) -> LauncherMessage:
    """Decode a line from the launcher. Raises `ProtocolError` for an invalid line."""
    return _decode(LauncherMessage, line, f"the launcher sent a message that {_NOT_KNOWN}")


def encode_file(content: JoinRequest | JoinAnswer | Status) -> str:
    """Encode a message as the content of a file."""
    kind: Any = type(content)
    text = _adapter(kind).dump_json(content, indent=1 if kind is Status else None)
    return text.decode() + "\n"


def decode_file(kind: type[FileT], content: bytes) -> FileT:
    """Decode the content of a file. Raises `ProtocolError` for invalid content."""
    return _decode(kind, content, f"not {_FILES[kind]}")


def values_of(message: LearnerMessage) -> Mapping[str, JsonValue]:
    """Return the values of an `Activity`, or an empty mapping for any other message."""
    return message.values if isinstance(message, Activity) else {}


def _decode(kind: type[MessageT], content: bytes, what: str) -> MessageT:
    known: Any = kind
    try:
        message: MessageT = _adapter(known).validate_json(content)
        return message
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = next((each for each in errors if each["loc"] == ("format",)), errors[0])  # explains the other errors
        where = ".".join(map(str, first["loc"]))
        shown = repr(content[:_SHOWN])[1:] + ("…" if len(content) > _SHOWN else "")
        raise ProtocolError(f"{what}: {where + ': ' if where else ''}{first['msg']}; it reads {shown}") from error
