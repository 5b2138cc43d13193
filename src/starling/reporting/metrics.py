"""Figures of a run for Prometheus, from what learners report to their launcher anyway.

A scrape reads the roster; learners send nothing for it.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starling.errors import ConfigError
from starling.launch.roster import LearnerRecord, Roster
from starling.reporting.epochs import together

STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """A collector of `prometheus_client` for one run; usable from any thread."""

    def __init__(self, roster: Roster, name: str, strategy: str) -> None:
        self._roster, self._name, self._strategy = roster, name, strategy

    def collect(self) -> list[Any]:
        """The metric families of a scrape."""
        with self._roster.lock:
            return list(self._families())

    def _families(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        kinds = {_COUNTER: CounterMetricFamily, _GAUGE: GaugeMetricFamily}
        roster = self._roster
        records = sorted(roster.learners.values(), key=lambda each: each.learner_id)
        run = InfoMetricFamily("starling_run", "The run.")
        run.add_metric([], {"name": self._name, "strategy": self._strategy})
        yield run
        fractions = [record.newest.fraction for record in records if record.newest is not None]
        num_joins = sum(record.num_joins for record in records)
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
            for record in records:
                if (found := value_of(roster, record)) is not None:
                    family.add_metric([str(record.learner_id)], float(found))
            yield family
        text = "Time spent waiting, by what for."
        waits = CounterMetricFamily("starling_waiting_seconds", text, labels=["learner", "what"])
        for record in records:
            waits.add_metric([str(record.learner_id), "data"], record.spent("waiting_for_data"))
            waits.add_metric([str(record.learner_id), "peers"], record.spent("waiting_for_peers"))
        yield waits
        yield _staleness(records)


def _over_epochs(what: str) -> Callable[[Roster, LearnerRecord], float | None]:
    return lambda roster, record: getattr(together(record.epochs), what, None)


def _newest(what: str) -> Callable[[Roster, LearnerRecord], float | None]:
    return lambda roster, record: getattr(record.newest, what, None)


_COUNTER, _GAUGE = "counter", "gauge"
_BY_LEARNER: Sequence[tuple[str, str, str, Callable[[Roster, LearnerRecord], float | None]]] = (
    (_COUNTER, "steps", "Mini-batches computed.", lambda roster, record: record.num_steps),
    (_COUNTER, "samples", "Examples computed.", lambda roster, record: record.num_examples),
    (_COUNTER, "frames", "Frames computed.", lambda roster, record: record.num_frames),
    (_GAUGE, "loss", "Training loss per frame, of the last report.", _newest("loss")),
    (_GAUGE, "learning_rate", "The learning rate of the last report.", _newest("learning_rate")),
    (
        _GAUGE,
        "audio_seconds_per_second",
        "Seconds of audio trained on per second, in the last report.",
        _newest("audio_rate"),
    ),
    (
        _GAUGE,
        "silence_seconds",
        "The time since the last message.",
        lambda roster, record: roster.since_heard(record),
    ),
    (
        _GAUGE,
        "wait_seconds",
        "How long the present wait has lasted; waits below 1 s count as 0.",
        lambda roster, record: roster.clock() - record.attempt.wait_began_at if record.attempt.wait else 0.0,
    ),
    (
        _COUNTER,
        "computing_seconds",
        "Time spent on gradients and steps.",
        lambda roster, record: record.spent("computing"),
    ),
    (_COUNTER, "rounds", "Averaging rounds, up to the last epoch.", _over_epochs("num_rounds")),
    (_COUNTER, "sent_bytes", "Bytes sent to other learners, up to the last epoch.", _over_epochs("bytes_sent")),
    (
        _COUNTER,
        "gradients_not_finite",
        "Gradients left out because they were not finite, up to the last epoch.",
        _over_epochs("num_not_finite"),
    ),
)
"""Kind, name, description and value of each metric that has only the label `learner`."""


def _staleness(records: Sequence[LearnerRecord]) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    text = "The staleness of gradients, up to the last epoch."
    family = HistogramMetricFamily("starling_staleness", text, labels=["learner"])
    for record in records:
        every = together(record.epochs)
        counts = every.staleness
        buckets = [(str(float(most)), sum(counts[: most + 1])) for most in STALENESS_BUCKETS]
        sum_of_all = every.mean_staleness * sum(counts)
        family.add_metric([str(record.learner_id)], [*buckets, ("+Inf", sum(counts))], sum_of_all)
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
