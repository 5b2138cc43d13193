"""The contents of experiments' folders, as the report page shows them."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Literal, TypeGuard

import numpy as np

from starling.events import Event
from starling.launch.messages import Stretch
from starling.reporting.epochs import merged, share
from starling.reporting.goodput import Goodput

Seconds = float
Section = Literal["training", "validation", "timeline", "staleness", "consensus", "scores", "audio", "events"]
"""A part of the page for which some experiments have no data."""
MAX_EVENTS = 200
"""Largest number of events in the table of one experiment: the first and the last ones are shown."""
_WARNINGS = ("loss", "left-out", "stall", "advice")


@dataclass(frozen=True)
class CurvePoint:
    """The training loss at one moment."""

    seconds: Seconds | None
    """Time of training; None if it was not recorded."""
    step: int
    """Number of mini-batches of all learners so far."""
    examples: int | None
    """Number of utterances, or other examples, of all learners so far; None if it was not recorded."""
    loss: float
    """The mean loss since the previous point, in which mini-batches count by their frames."""
    low: float | None = None
    """Lowest loss of several runs, with `high` as the highest; None for one run."""
    high: float | None = None


@dataclass(frozen=True)
class Utterance:
    """One scored utterance."""

    rank: Literal["best", "median", "worst"]
    name: str
    errors: int
    words: int
    """The number of words in the reference."""
    alignment: tuple[tuple[str, str], ...]
    """Pairs of a word of the reference and one of the hypothesis; empty for no word."""
    audio: str | None = None
    """Audio as a `data:` URI."""


@dataclass(frozen=True)
class ScoredSet:
    """The scores of one set, from an experiment's `decode` folder."""

    name: str
    folder: str
    """Folder of its texts: `decode`, or that of another search, such as `decode/beam`."""
    wer: float
    """Word error rate, in per cent."""
    interval: tuple[float, float] | None
    """95 % bootstrap interval of the WER, in per cent; None if there are too few words."""
    cer: float
    words: int
    insertions: int
    deletions: int
    substitutions: int
    num_utterances: int
    num_wrong: int
    utterances: tuple[Utterance, ...]
    """The best, median and worst ones; empty for another search."""
    confusions: tuple[tuple[str, str, int], ...]
    """Most frequent errors: the word of the reference and the recognised word, empty for none, and the number of
    occurrences."""
    num_confusions: int
    """Number of different errors, of which `confusions` holds the most frequent ones."""


@dataclass(frozen=True)
class Happening:
    """An event of a run that appears in no figure."""

    at: Seconds | None
    """Time since the run began; None on a simulated clock."""
    kind: str
    text: str


@dataclass(frozen=True)
class Evidence:
    """All data in an experiment's folder."""

    label: str
    """Name of the experiment among those of the page."""
    path: Path
    strategy: str
    learners: int
    is_virtual: bool
    outcome: str
    """How the run ended, in words."""
    unit: str = "utterances"
    """Unit of the examples in its mini-batches."""
    loss_unit: str = ""
    """Unit over which the loss is a mean: `token`, `frame`, or empty if the workload's own function says."""
    events: Sequence[Event] = ()
    stretches: Sequence[Stretch] = ()
    curve: Sequence[CurvePoint] = ()
    sets: Sequence[ScoredSet] = ()
    missing: dict[Section, str] = field(default_factory=dict)
    """Reasons why parts are missing, each in a sentence."""

    @property
    def settings(self) -> str:
        """The recipe, or the comparison, as YAML."""
        return _text(self.path / "config.yaml") or _text(self.path / "compare.yaml")

    @property
    def environment(self) -> str:
        """Versions and machine, as text."""
        return _text(self.path / "env.txt")

    @property
    def commands(self) -> list[str]:
        """The commands that started the run, as far as it recorded them."""
        return list(dict.fromkeys(str(each["command"]) for each in self.events if each.get("command")))

    @property
    def verdict(self) -> str:
        """Why the model does not work, and what to do, as the newest run reported last; empty if it reported
        nothing."""
        told = [each for each in self.events if each["kind"] in ("start", "verdict")]
        return str(told[-1].get("text", "")) if told else ""

    @cached_property
    def whole(self) -> Stretch:
        """The run of all learners as one stretch, from the first beginning to the last end."""
        whole = merged(self.stretches)
        return replace(whole, seconds=whole.end - min((each.begin for each in self.stretches), default=0.0))

    def share(self, what: Literal["computing", "waiting_for_data", "waiting_for_peers"]) -> float | None:
        """The share of one kind of the learners' time, in per cent of their training time."""
        return share(work, what) if (work := merged(self.stretches)).seconds else None

    @property
    def num_batches(self) -> int:
        """The number of mini-batches that all learners computed."""
        return self.whole.batches or max((each.step for each in self.curve), default=0)

    @property
    def throughput(self) -> float | None:
        """Examples per second of all learners; None if it was not recorded."""
        return self.whole.examples / seconds if (seconds := self.whole.seconds) else None

    @property
    def goodput(self) -> Goodput | None:
        """The goodput of the newest run; None if it was not recorded."""
        names = [each.name for each in fields(Goodput)]
        found = [
            each for each in self.events if each["kind"] == "goodput" and all(is_number(each.get(n)) for n in names)
        ]
        return Goodput(**{name: found[-1][name] for name in names}) if found and found[-1]["machines"] else None

    @property
    def is_resumed(self) -> bool:
        """Whether the newest run continued an earlier one."""
        return [each["kind"] for each in self.events].count("start") > 1

    @property
    def warnings(self) -> list[str]:
        """The error that ended the newest run, and the run's losses, stalls and advice."""
        starts = [place for place, each in enumerate(self.events) if each["kind"] == "start"]
        newest = self.events[starts[-1] :] if starts else self.events
        serious = [each for each in newest if each.get("exit_code")] + [
            each for each in newest if each["kind"] in _WARNINGS
        ]
        return list(dict.fromkeys(map(_told, serious)))

    @property
    def validations(self) -> list[tuple[float, float]]:
        """The number of epochs after which a model was scored, with its word error rate on the valid set in per cent.
        Inside an epoch, it is a fraction."""
        ends = ((each["step"], each["epoch"]) for each in newest(self.events, "epoch") if is_number(each.get("epoch")))
        steps, numbers = zip((0.0, 0.0), *ends, strict=True)
        found = []
        for each in newest(self.events, "validation"):
            done: object = each.get("epochs")
            if done is None and each["step"] <= steps[-1]:
                done = np.interp(each["step"], steps, numbers)
            if is_number(done) and is_number(each.get("wer")):
                found.append((float(done), float(each["wer"])))
        return found

    @property
    def staleness(self) -> list[int]:
        """The number of gradients with a staleness of 0, 1, 2, …; the last number may include all larger ones."""
        given = [each.get("staleness") for each in newest(self.events, "epoch")]
        counts = [each for each in given if isinstance(each, list) and all(isinstance(count, int) for count in each)]
        return [sum(each) for each in zip_longest(*counts, fillvalue=0)]

    @property
    def distances(self) -> list[tuple[int, float]]:
        """Consensus distances above 0, each with the number of mini-batches so far: from checkpoints, whose names
        contain that number, and from epochs of simulations. Those of the end, when learners may have averaged once
        more, are left out, and so is a single one."""
        found: dict[int, float] = {}
        for each in self.events:
            step, distance = each.get("step"), each.get("consensus_distance")
            if each["kind"] == "checkpoint":
                number = Path(str(each.get("folder", ""))).name.removeprefix("step-").partition("-")[0]
                step = int(number) if number.isdecimal() else None
            is_shown = each["kind"] in ("checkpoint", "epoch") and each.get("moment") != "end"
            if is_shown and is_number(step) and is_number(distance) and distance > 0.0:
                found[int(step)] = float(distance)
        return sorted(found.items()) if len(found) > 1 else []

    @property
    def happenings(self) -> list[Happening]:
        """The events that appear in no figure, in words. Verdicts are shortened; the page begins with the newest."""
        began = next((each["time"] for each in self.events if is_number(each.get("time"))), 0.0)
        told = []
        for event in self.events:
            if text := _told(event).partition("; likeliest cause: ")[0]:
                at = float(event["time"]) - began if is_number(event.get("time")) and not self.is_virtual else None
                told.append(Happening(at, str(event["kind"]), text))
        if (left_out := len(told) - MAX_EVENTS) > 0:
            half = MAX_EVENTS // 2
            told[half:-half] = [Happening(None, "…", f"{left_out} events are not shown; all are in log/events.jsonl")]
        return told


def newest(events: Sequence[Event], kind: str) -> Iterator[Event]:
    """Events of a kind, each step once: a resumed run reports again what it computes again."""
    by_step = {step: each for each in events if each["kind"] == kind and is_number(step := each.get("step"))}
    return (by_step[step] for step in sorted(by_step))


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of an event is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_TOLD = {
    "start": "{learners} learners, {strategy}",
    "join": "learner {learner} joined; {num_learners} learners train now",
    "checkpoint": "{folder} ({moment})",
    "end": "{message} (exit code {exit_code})",
    **dict.fromkeys(("loss", "left-out"), "{reason}"),
    **dict.fromkeys(("stall", "stall-over", "advice", "message", "verdict"), "{text}"),
}
"""Texts about the events that appear in no figure, by their kinds."""


def _told(event: Event) -> str:
    return _TOLD.get(event["kind"], "").format_map(defaultdict(str, event))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
