"""Figures of a run for Prometheus, from what learners report to their launcher anyway.

A scrape reads the roster; learners send nothing for it.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starling.errors import ConfigError
from starling.launch.roster import LearnerRecord, Roster
from starling.reporting.epochs import together

STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
_Sample = tuple[bool, str, str, Mapping[str, object], float | None]
"""Whether it is a counter, else a gauge; name, description, labels; and the value, if there is one yet."""


class Metrics:
    """A collector of `prometheus_client` for one run; usable from any thread."""

    def __init__(self, roster: Roster, name: str, strategy: str) -> None:
        self._roster, self._name, self._strategy = roster, name, strategy

    def collect(self) -> list[Any]:
        """The metric families of a scrape."""
        from prometheus_client import core

        run = core.InfoMetricFamily("starling_run", "The run.", {"name": self._name, "strategy": self._strategy})
        text = "The staleness of gradients, up to the last epoch."
        staleness = core.HistogramMetricFamily("starling_staleness", text, labels=["learner"])
        found: dict[str, Any] = {}
        with self._roster.lock:
            records = sorted(self._roster.learners.values(), key=lambda each: each.learner_id)
            for record in records:
                every = together(record.epochs)
                counts, total = every.staleness, sum(every.staleness)
                buckets = [(str(float(most)), sum(counts[: most + 1])) for most in STALENESS_BUCKETS]
                of_all = every.mean_staleness * total
                staleness.add_metric([str(record.learner_id)], [*buckets, ("+Inf", total)], of_all)
            samples = [*_of_run(self._roster, records)]
            samples += [sample for record in records for sample in _of_learner(self._roster, record)]
        for is_counter, name, text, labels, value in samples:
            if name not in found:
                kind = core.CounterMetricFamily if is_counter else core.GaugeMetricFamily
                found[name] = kind(f"starling_{name}", text, labels=list(labels))
            if value is not None:
                found[name].add_metric([str(each) for each in labels.values()], float(value))
        return [run, *found.values(), staleness]


def _of_run(roster: Roster, records: Sequence[LearnerRecord]) -> Iterator[_Sample]:
    spent = max((record.newest.fraction for record in records if record.newest is not None), default=0.0)
    num_joins = sum(record.num_joins for record in records)
    yield False, "learners_alive", "Learners that are starting, ready or training.", {}, len(roster.present())
    yield False, "membership", "The number of the newest membership.", {}, roster.membership.number
    yield False, "progress_ratio", "The spent fraction of the budget.", {}, spent
    yield True, "deaths", "Learners that were lost.", {}, len(roster.lost)
    yield True, "joins", "Learners that joined after the start, restarted ones included.", {}, num_joins
    yield True, "checkpoints", "Checkpoints that are complete.", {}, roster.num_saved


def _of_learner(roster: Roster, record: LearnerRecord) -> Iterator[_Sample]:
    own, every, newest, attempt = {"learner": record.learner_id}, together(record.epochs), record.newest, record.attempt
    waited = roster.clock() - attempt.wait_began_at if attempt.wait else 0.0
    rate, audio_rate = (newest.learning_rate, newest.audio_rate) if newest is not None else (None, None)
    yield True, "steps", "Mini-batches computed.", own, record.num_steps
    yield True, "samples", "Examples computed.", own, record.num_examples
    yield True, "frames", "Frames computed.", own, record.num_frames
    yield False, "loss", "Training loss per frame, of the last report.", own, record.loss
    yield False, "learning_rate", "The learning rate of the last report.", own, rate
    text = "Seconds of audio trained on per second, in the last report."
    yield False, "audio_seconds_per_second", text, own, audio_rate
    yield False, "silence_seconds", "The time since the last message.", own, roster.since_heard(record)
    yield False, "wait_seconds", "How long the present wait has lasted; waits below 1 s count as 0.", own, waited
    yield True, "computing_seconds", "Time spent on gradients and steps.", own, record.spent("computing")
    for what, seconds in (("data", record.spent("waiting_for_data")), ("peers", record.spent("waiting_for_peers"))):
        yield True, "waiting_seconds", "Time spent waiting, by what for.", {**own, "what": what}, seconds
    yield True, "rounds", "Averaging rounds, up to the last epoch.", own, every.num_rounds
    yield True, "sent_bytes", "Bytes sent to other learners, up to the last epoch.", own, every.bytes_sent
    text = "Gradients left out because they were not finite, up to the last epoch."
    yield True, "gradients_not_finite", text, own, every.num_not_finite


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
