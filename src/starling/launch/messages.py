"""Every message between a launcher, its learners, and the commands that look at a run or change it.

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
"""How many bytes of an invalid message its error shows."""


class _Message:
    __pydantic_config__ = _STRICT

    def __init_subclass__(cls, kind: str = "") -> None:
        """Give a message that travels over a socket its last field, `kind`, by which the other end knows it."""
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
    """The learner's process runs."""

    num_steps: int | None = None
    """Mini-batches that this process has computed; None before it trains."""
    stall: Stall | None = None
    """Its current wait, if that is a long one."""


@dataclass(frozen=True)
class Hello(LearnerMessage, kind="hello"):
    """The first message over a connection of its own, to the launcher or the coordinator."""

    who: tuple[str, ...]
    """Who comes, and what the other side must know of it."""
    challenge: str
    """A random number, over which the other side proves that it knows the run token."""
    proof: str
    """Shows, over the other side's random number, that the sender knows the run token."""


@dataclass(frozen=True)
class Reached(LearnerMessage, kind="reached"):
    """The learner has reached a stage on its way into a membership."""

    stage: Stage
    """ready: it waits for a membership that includes it; arrived: it waits for the other members; entered: all have
    met, and it trains."""
    generation: int
    """The membership's generation; -1 if it waits for its first one."""


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
    """The name of the exception's class."""
    text: str


@dataclass(frozen=True)
class Ended(LearnerMessage, kind="ended"):
    """The learner's training is done."""

    num_steps: int


@dataclass
class Stretch:
    """What one learner did for some time; or several learners or stretches together, whose numbers are sums.

    A loss that is not finite is excluded, and counted elsewhere. `end` is the time of training since the beginning of
    the run.
    """

    learner: int = -1
    end: Seconds = 0.0
    seconds: Seconds = 0.0
    """How long it took."""
    step: int = -1
    """The index in the run of the last mini-batch, from 0; all learners share the numbering."""
    batches: int = 0
    examples: int = 0
    frames: int = 0
    losses: float = 0.0
    """Losses times frames."""
    audio: Seconds = 0.0
    computing: Seconds = 0.0
    """Time spent on gradients and steps."""
    waiting_for_data: Seconds = 0.0
    waiting_for_peers: Seconds = 0.0
    rounds: int = 0
    """Averaging rounds; this and the next three are counted when an epoch ends."""
    bytes_sent: int = 0
    """Bytes sent to other learners."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of gradients by staleness."""
    num_not_finite: int = 0
    """Gradients that were skipped because they were not finite."""

    def add(self, other: "Stretch") -> None:
        """Make this one of both."""
        own, more = vars(self), vars(other)
        for name in _SUMMED:
            own[name] = own[name] + more[name]  # not in place, because copies share the counter
        self.learner, self.end, self.step = other.learner, max(self.end, other.end), max(self.step, other.step)

    def since(self, before: "Stretch") -> "Stretch":
        """What has been added since this one was `before`."""
        more: dict[str, Any] = {name: getattr(self, name) - getattr(before, name) for name in _SUMMED}
        return Stretch(self.learner, self.end, step=self.step, **more)

    @property
    def begin(self) -> Seconds:
        """When it began, if it is of one learner."""
        return self.end - self.seconds

    @property
    def loss(self) -> float:
        """The mean loss per frame; NaN without frames."""
        return self.losses / self.frames if self.frames else math.nan

    @property
    def audio_rate(self) -> float:
        """Seconds of audio trained on per second; 0 when no time has passed."""
        return self.audio / self.seconds if self.seconds > 0.0 else 0.0


_SUMMED = tuple(each.name for each in fields(Stretch) if each.name not in ("learner", "end", "step"))


@dataclass(frozen=True)
class Progress(LearnerMessage, kind="progress"):
    """What a learner has done; sent from time to time, and whenever it has ended an epoch."""

    learner_id: int
    new: Stretch
    """What it has done since its previous progress; without frames if only time has passed."""
    so_far: Stretch
    """What it has done in the epoch."""
    epoch: int = 0
    batch: int = -1
    """The index in the epoch, from 0, of the mini-batch that was computed last; all learners share the numbering."""
    num_batches: int = 0
    """Mini-batches in the epoch."""
    learning_rate: float | None = None
    """The learning rate of the last gradient; None before the first."""
    fraction: float = 0.0
    """The spent fraction of the budget."""
    ended_at: int | None = None
    """Mini-batches of all learners from the start of the run to the end of the epoch; None while it is under way."""
    consensus_distance: float | None = None
    """(1/L) sum_l |w_l - mean|^2 at the epoch's end; None if unknown."""

    @classmethod
    def between(cls, told: Stretch, began: Stretch, now: Stretch) -> "Progress":
        """The progress of a learner whose counts are `now`, were `told` in the last message, and were `began` when the
        epoch began."""
        return cls(now.learner, now.since(told), now.since(began))


@dataclass(frozen=True)
class Saved(LearnerMessage, kind="saved"):
    """A checkpoint is complete."""

    folder: str
    moment: Literal["epoch", "barrier", "end"]
    """The end of an epoch, a checkpoint barrier inside one, or the end of the run."""
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
    """Empty: unchanged."""
    values: dict[str, JsonValue] = field(default_factory=dict)
    """Passed to `on_message` of `launch`; Starling itself ignores them."""


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
    """The answer to `Hello`."""

    refused: str = ""
    """Why the sender may not take part; empty: it may."""
    proof: str = ""
    """Shows that the other side knows the run token."""


# Between `starling join` and a launcher


@dataclass(frozen=True)
class JoinRequest(_Message):
    """A request for more learners."""

    learners: int
    """How many to add."""
    id: str = ""
    """Part of the file's name."""


@dataclass(frozen=True)
class JoinAnswer(_Message):
    """The outcome of a join request."""

    refused: str = ""
    """Why the request was refused; empty if it was granted."""
    joined: tuple[int, ...] = ()
    """The ids of the learners that joined."""
    failed: tuple[str, ...] = ()
    """Why each of the others did not join."""
    learners: int = 0
    """The number of learners that train now."""


# From a launcher to `starling status`


@dataclass(frozen=True)
class LearnerStatus(_Message):
    """One learner."""

    learner_id: int
    rank: int | None
    """Its rank in the newest membership; None if it is not a member."""
    state: str
    """Its state or activity as text."""
    num_steps: int
    loss: float | None
    """The newest training loss that it reported."""
    heard: Seconds | None
    """The time since its last message; None before the first."""
    log: str
    """The path of its log, relative to the experiment's folder."""
    node: str = ""
    """The cluster's node on which it runs; empty on the launcher's machine, and before it has one."""


@dataclass(frozen=True)
class Status(_Message):
    """The state of a run. `began` and `written` are Unix timestamps."""

    name: str
    strategy: str
    stage: Literal["training", "scoring", "ended"]
    began: float
    written: float
    pid: int
    """The launcher's process id."""
    generation: int
    """The generation of the newest membership that a learner has entered; -1 before the first."""
    learners: tuple[LearnerStatus, ...]
    losses: tuple[str, ...]
    """How each lost learner was lost."""
    saved: str
    """The newest checkpoint of this run; empty if there is none."""
    saved_age: Seconds
    """The time since the newest checkpoint was completed."""
    exit_code: int | None
    """None until the run has ended."""
    message: str
    """How the run ended; empty until then."""
    machine: str = ""
    """The name of the launcher's machine; empty in what earlier versions wrote."""
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
    """A message as one line of JSON."""
    return _adapter(type(message).__base__).dump_json(message) + b"\n"


def decode_from_learner(line: bytes, learner_id: int) -> LearnerMessage:
    """Decode a line from a learner. Raises ProtocolError."""
    return _decode(LearnerMessage, line, f"learner {learner_id} sent a message that {_NOT_KNOWN}")


def decode_from_launcher(line: bytes) -> LauncherMessage:
    """Decode a line from the launcher. Raises ProtocolError."""
    return _decode(LauncherMessage, line, f"the launcher sent a message that {_NOT_KNOWN}")


def encode_file(content: JoinRequest | JoinAnswer | Status) -> str:
    """A message as the content of a file."""
    kind: Any = type(content)
    text = _adapter(kind).dump_json(content, indent=1 if kind is Status else None)
    return text.decode() + "\n"


def decode_file(kind: type[FileT], content: bytes) -> FileT:
    """Decode the content of a file. Raises ProtocolError."""
    return _decode(kind, content, f"not {_FILES[kind]}")


def values_of(message: LearnerMessage) -> Mapping[str, JsonValue]:
    """The values of an `Activity`; empty for any other message."""
    return message.values if isinstance(message, Activity) else {}


def _decode(kind: type[MessageT], content: bytes, what: str) -> MessageT:
    known: Any = kind
    try:
        message: MessageT = _adapter(known).validate_json(content)
        return message
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = next((each for each in errors if each["loc"] == ("format",)), errors[0])  # it explains the others
        where = ".".join(map(str, first["loc"]))
        shown = repr(content[:_SHOWN])[1:] + ("…" if len(content) > _SHOWN else "")
        raise ProtocolError(f"{what}: {where + ': ' if where else ''}{first['msg']}; it reads {shown}") from error
