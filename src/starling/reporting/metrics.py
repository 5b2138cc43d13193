"""Figures of a run for Prometheus, from what learners report to their launcher anyway.

A scrape reads the roster and what has been summed up here; learners send nothing for it.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from starling.errors import ConfigError
from starling.launch.messages import EpochEnd, LearnerMessage, Snapshot
from starling.launch.roster import LearnerRecord, Roster

STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


@dataclass
class _Rising:
    """A sum over epochs of a value that a learner reports for the epoch so far; it never falls."""

    before: float = 0.0
    now: float = 0.0

    def set(self, value: float) -> None:
        if value < self.now:  # the learner was restarted in the middle of an epoch
            self.before += self.now
        self.now = value

    def end(self, value: float) -> None:
        self.set(value)
        self.before, self.now = self.before + value, 0.0

    @property
    def total(self) -> float:
        return self.before + self.now


@dataclass
class _Learner:
    samples: int = 0
    frames: int = 0
    computing: _Rising = field(default_factory=_Rising)
    waiting_for_data: _Rising = field(default_factory=_Rising)
    waiting_for_peers: _Rising = field(default_factory=_Rising)
    rounds: int = 0
    bytes_sent: int = 0
    not_finite: int = 0
    staleness: list[int] = field(default_factory=list)
    staleness_sum: float = 0.0
    snapshot: Snapshot | None = None


class Metrics:
    """A collector of `prometheus_client` for one run; usable from any thread."""

    def __init__(self, roster: Roster, name: str, strategy: str) -> None:
        self._roster, self._name, self._strategy = roster, name, strategy
        self._learners: dict[int, _Learner] = {}
        self._lock = threading.Lock()

    def hear(self, learner_id: int, message: LearnerMessage) -> None:
        """Add what a learner reports."""
        if not isinstance(message, Snapshot | EpochEnd):
            return
        with self._lock:
            learner = self._learners.setdefault(learner_id, _Learner())
            if isinstance(message, Snapshot):
                learner.snapshot = message
                learner.samples += message.num_examples
                learner.frames += message.num_frames
                for name in ("computing", "waiting_for_data", "waiting_for_peers"):
                    getattr(learner, name).set(getattr(message, name))
                return
            for name in ("computing", "waiting_for_data", "waiting_for_peers"):
                getattr(learner, name).end(getattr(message, name))
            learner.rounds += message.num_rounds
            learner.bytes_sent += message.bytes_sent
            learner.not_finite += message.num_not_finite
            counts = zip_longest(learner.staleness, message.staleness, fillvalue=0)
            learner.staleness = [before + more for before, more in counts]
            learner.staleness_sum += message.mean_staleness * sum(message.staleness)

    def collect(self) -> list[Any]:
        """The metric families of a scrape."""
        with self._roster.lock, self._lock:
            return list(self._families())

    def _families(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        kinds = {_COUNTER: CounterMetricFamily, _GAUGE: GaugeMetricFamily}
        roster = self._roster
        records = sorted(roster.learners.values(), key=lambda each: each.learner_id)
        learners = [(record, self._learners.get(record.learner_id, _Learner())) for record in records]
        run = InfoMetricFamily("starling_run", "The run.")
        run.add_metric([], {"name": self._name, "strategy": self._strategy})
        yield run
        num_joins = sum(record.num_joins for record in records)
        fractions = [learner.snapshot.fraction for _, learner in learners if learner.snapshot is not None]
        for kind, name, text, value in (
            (_GAUGE, "learners_alive", "Learners that are starting, ready or training.", len(list(roster.present()))),
            (_GAUGE, "membership", "The number of the newest membership.", roster.membership.generation),
            (_GAUGE, "progress_ratio", "The spent fraction of the budget.", max(fractions, default=0.0)),
            (_COUNTER, "deaths", "Learners that were lost.", len(roster.lost)),
            (_COUNTER, "joins", "Learners that joined after the start, restarted ones included.", num_joins),
            (_COUNTER, "checkpoints", "Checkpoints that are complete.", roster.num_saved),
        ):
            yield kinds[kind](f"starling_{name}", text, float(value))
        for kind, name, text, value_of in _BY_LEARNER:
            family = kinds[kind](f"starling_{name}", text, labels=["learner"])
            for record, learner in learners:
                if (found := value_of(roster, record, learner)) is not None:
                    family.add_metric([str(record.learner_id)], float(found))
            yield family
        text = "Time spent waiting, by what for."
        waits = CounterMetricFamily("starling_waiting_seconds", text, labels=["learner", "what"])
        for record, learner in learners:
            waits.add_metric([str(record.learner_id), "data"], learner.waiting_for_data.total)
            waits.add_metric([str(record.learner_id), "peers"], learner.waiting_for_peers.total)
        yield waits
        yield _staleness(learners)


_COUNTER, _GAUGE = "counter", "gauge"
_ValueOf = Callable[[Roster, LearnerRecord, _Learner], float | None]
_BY_LEARNER: Sequence[tuple[str, str, str, _ValueOf]] = (
    (_COUNTER, "steps", "Mini-batches computed.", lambda roster, record, learner: record.num_steps),
    (_COUNTER, "samples", "Examples computed.", lambda roster, record, learner: learner.samples),
    (_COUNTER, "frames", "Frames computed.", lambda roster, record, learner: learner.frames),
    (_GAUGE, "loss", "Training loss per frame, of the last report.", lambda roster, record, learner: record.loss),
    (
        _GAUGE,
        "learning_rate",
        "The learning rate of the last report.",
        lambda roster, record, learner: learner.snapshot.learning_rate if learner.snapshot else None,
    ),
    (
        _GAUGE,
        "audio_seconds_per_second",
        "Seconds of audio trained on per second, in the last report.",
        lambda roster, record, learner: learner.snapshot.audio_rate if learner.snapshot else None,
    ),
    (
        _GAUGE,
        "silence_seconds",
        "The time since the last message.",
        lambda roster, record, learner: roster.since_heard(record),
    ),
    (
        _GAUGE,
        "wait_seconds",
        "How long the present wait has lasted; waits below 1 s count as 0.",
        lambda roster, record, learner: roster.clock() - record.attempt.wait_began_at if record.attempt.wait else 0.0,
    ),
    (
        _COUNTER,
        "computing_seconds",
        "Time spent on gradients and steps.",
        lambda roster, record, learner: learner.computing.total,
    ),
    (_COUNTER, "rounds", "Averaging rounds, up to the last epoch.", lambda roster, record, learner: learner.rounds),
    (
        _COUNTER,
        "sent_bytes",
        "Bytes sent to other learners, up to the last epoch.",
        lambda roster, record, learner: learner.bytes_sent,
    ),
    (
        _COUNTER,
        "gradients_not_finite",
        "Gradients left out because they were not finite, up to the last epoch.",
        lambda roster, record, learner: learner.not_finite,
    ),
)
"""Kind, name, description and value of each metric that has only the label `learner`."""


def _staleness(learners: Sequence[tuple[LearnerRecord, _Learner]]) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    text = "The staleness of gradients, up to the last epoch."
    family = HistogramMetricFamily("starling_staleness", text, labels=["learner"])
    for record, learner in learners:
        counts = [(str(float(most)), sum(learner.staleness[: most + 1])) for most in STALENESS_BUCKETS]
        buckets = [*counts, ("+Inf", sum(learner.staleness))]
        family.add_metric([str(record.learner_id)], buckets, learner.staleness_sum)
    return family


@contextmanager
def serving(metrics: Metrics, address: str, port: int) -> Generator[int, None, None]:
    """Within this context, Prometheus can scrape the metrics at `http://address:port/metrics`; yields the port.

    Raises ConfigError if the port cannot be used.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        raise ConfigError(
            f"launch.metrics_port: nothing can listen on {address}:{port} ({error.strerror or error}); choose another "
            "port"
        ) from None
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
