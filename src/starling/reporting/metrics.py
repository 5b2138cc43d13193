"""Figures of a run for other programs: curves for TensorBoard, and metrics for Prometheus and OpenTelemetry.

All use only what learners report anyway. Metrics are read from the roster; learners send nothing for them.
"""

import math
import os
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starling.errors import ConfigError
from starling.launch.messages import Progress
from starling.launch.roster import LearnerRecord, Roster
from starling.reporting.epochs import SPENT, by_staleness, mean_staleness, share
from starling.reporting.goodput import goodput_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
FIGURES = {
    "learners.alive": ("gauge", "{learner}", "Learners that are starting, ready or training."),
    "membership": ("gauge", "", "The number of the newest membership."),
    "progress": ("gauge", "1", "The spent fraction of the budget."),
    "deaths": ("counter", "{learner}", "Learners that were lost."),
    "joins": ("counter", "{learner}", "Learners that joined after the start, restarted ones included."),
    "checkpoints": ("counter", "{checkpoint}", "Checkpoints that are complete."),
    "goodput": ("gauge", "1", "The share of the machines' time spent on gradients and steps."),
    "goodput.loss": ("gauge", "1", "The share of the machines' time lost."),
    "steps": ("counter", "{step}", "Mini-batches computed."),
    "samples": ("counter", "{sample}", "Examples computed."),
    "frames": ("counter", "{frame}", "Frames computed."),
    "loss": ("gauge", "", "Training loss in the last report."),
    "learning_rate": ("gauge", "", "The learning rate in the last report."),
    "audio": ("gauge", "s/s", "Seconds of audio trained on per second in the last report."),
    "silence": ("gauge", "s", "The time since the last message."),
    "wait": ("gauge", "s", "How long the present wait has lasted; waits below 1 s count as 0."),
    "computing": ("counter", "s", "Time spent on gradients and steps."),
    "waiting": ("counter", "s", "Time spent waiting for data or peers."),
    "rounds": ("counter", "{round}", "Averaging rounds, up to the last epoch."),
    "sent": ("counter", "By", "Bytes sent to other learners, up to the last epoch."),
    "gradients.not_finite": (
        "counter",
        "{gradient}",
        "Gradients left out because they were not finite, up to the last epoch.",
    ),
}
"""Kind, unit and description of each metric but staleness, by its name in OpenTelemetry after `starling.`."""
STALENESS = "The staleness of gradients, up to the last epoch."
_SUFFIXES = {"1": "_ratio", "s": "_seconds", "s/s": "_seconds_per_second", "By": "_bytes"}
"""What OpenTelemetry's rules append to the name of a metric with this unit for Prometheus."""
_Sample = tuple[str, Mapping[str, object], float | None]
"""Sample of a metric: its name in FIGURES, labels, and the value, if there is one yet."""


class Curves:
    """A listener that writes the reports of learners as event files, each learner's in a separate folder inside
    `folder`. Steps count the mini-batches of the whole run.

    Writes nothing if TensorBoard is not installed; the extra `speech` installs it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, SummaryWriter] = {}

    def __call__(self, progress: Progress) -> None:
        """Add loss, learning rate and throughput; at the end of an epoch, also its time and averaging statistics by
        epoch (counted from 1), and the consensus distance, if known, by step."""
        name, new, work = f"learner-{progress.learner_id}", progress.new, progress.so_far
        if new.frames and progress.learning_rate is not None:
            values = {
                "train/loss": new.loss,
                "train/running_loss": work.loss,
                "train/learning_rate": progress.learning_rate,
                "train/audio_seconds_per_second": new.audio_rate,
            }
            self.add(name, values, new.step)
        if progress.ended_at is None:
            return
        values = {
            **{f"time/{kind}": share(work, kind) for kind in SPENT},
            "averaging/rounds_per_gradient": work.rounds / work.batches if work.batches else 0.0,
            "averaging/megabytes_sent": work.bytes_sent / 1e6,
            "averaging/mean_staleness": mean_staleness(work.staleness),
        }
        self.add(name, values, progress.epoch + 1)
        if any(counts := by_staleness(work.staleness)) and (writer := self._writer(name)) is not None:
            present = [value for value, count in enumerate(counts) if count]
            writer.add_histogram_raw(
                "averaging/staleness",
                min=present[0] - 0.5,
                max=present[-1] + 0.5,
                num=sum(counts),
                sum=sum(value * count for value, count in enumerate(counts)),
                sum_squares=sum(value * value * count for value, count in enumerate(counts)),
                bucket_limits=[value + 0.5 for value in range(len(counts))],  # each of width 1, around an integer
                bucket_counts=list(counts),
                global_step=progress.epoch + 1,
            )
        if progress.consensus_distance is not None:
            self.add(name, {"consensus/distance": progress.consensus_distance}, progress.ended_at)

    def add(self, name: str, values: Mapping[str, float], step: int) -> None:
        """Add a point to each of the curves in the folder `name`."""
        if (writer := self._writer(name)) is not None:
            for curve, value in values.items():
                writer.add_scalar(curve, value, step)

    def close(self) -> None:
        """Flush and close the files."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, name: str) -> "SummaryWriter | None":
        if name not in self._writers:
            try:
                from torch.utils import tensorboard  # imported here, because it takes 0.3 s
            except ModuleNotFoundError:
                return None
            self._writers[name] = tensorboard.SummaryWriter(str(self._folder / name))
        return self._writers[name]


class Metrics:
    """The metrics of one run: a collector of `prometheus_client`, and what OpenTelemetry observes; usable from any
    thread."""

    def __init__(self, roster: Roster, name: str, strategy: str) -> None:
        self._roster = roster
        self.run = {"name": name, "strategy": strategy}

    def samples(self) -> list[_Sample]:
        """All metrics that have a value now, except staleness."""
        with self._roster.lock:
            records = self._records()
            found = [*_of_run(self._roster, records)]
            found += [sample for record in records for sample in _of_learner(self._roster, record)]
        return [sample for sample in found if sample[2] is not None]

    def staleness(self) -> dict[int, Counter[int]]:
        """How many gradients had each staleness, by the id of the learner."""
        with self._roster.lock:
            return {record.learner_id: Counter(record.done.staleness) for record in self._records()}

    def collect(self) -> list[Any]:
        """The metric families of a scrape."""
        from prometheus_client import core

        run = core.InfoMetricFamily("starling_run", "The run.", self.run)
        staleness = core.HistogramMetricFamily("starling_staleness", STALENESS, labels=["learner"])
        for learner, counts in self.staleness().items():
            most_of = {str(float(most)): most for most in STALENESS_BUCKETS} | {"+Inf": math.inf}
            buckets = [
                (name, sum(count for value, count in counts.items() if value <= most)) for name, most in most_of.items()
            ]
            staleness.add_metric([str(learner)], buckets, sum(value * count for value, count in counts.items()))
        families = {
            name: core.Metric(f"starling_{name.replace('.', '_')}{_SUFFIXES.get(unit, '')}", text, kind)
            for name, (kind, unit, text) in FIGURES.items()
        }
        for name, labels, value in self.samples():
            family = families[name]
            full = family.name + ("_total" if family.type == "counter" else "")
            family.add_sample(full, {label: str(each) for label, each in labels.items()}, value)
        return [run, *families.values(), staleness]

    def _records(self) -> list[LearnerRecord]:
        return sorted(self._roster.learners.values(), key=lambda each: each.learner_id)


def _of_run(roster: Roster, records: Sequence[LearnerRecord]) -> Iterator[_Sample]:
    yield "learners.alive", {}, len(roster.present())
    yield "membership", {}, roster.membership.number
    yield "progress", {}, max((record.newest.fraction for record in records if record.newest is not None), default=0.0)
    yield "deaths", {}, len(roster.lost)
    yield "joins", {}, sum(record.num_joins for record in records)
    yield "checkpoints", {}, roster.num_saved
    if (goodput := goodput_of(roster)) is not None:
        yield "goodput", {}, goodput.ratio
        for cause, part in goodput.losses.items():
            yield "goodput.loss", {"cause": cause}, part


def _of_learner(roster: Roster, record: LearnerRecord) -> Iterator[_Sample]:
    own, done, newest, attempt = {"learner": record.learner_id}, record.done, record.newest, record.attempt
    yield "steps", own, record.num_steps
    yield "samples", own, done.examples
    yield "frames", own, done.frames
    yield "loss", own, record.loss
    if newest is not None:
        yield "learning_rate", own, newest.learning_rate
        yield "audio", own, newest.new.audio_rate
    yield "silence", own, roster.since_heard(record)
    yield "wait", own, roster.clock() - attempt.wait_began_at if attempt.wait else 0.0
    yield "computing", own, done.computing
    for what, seconds in (("data", done.waiting_for_data), ("peers", done.waiting_for_peers)):
        yield "waiting", {**own, "what": what}, seconds
    yield "rounds", own, done.rounds
    yield "sent", own, done.bytes_sent
    yield "gradients.not_finite", own, done.num_not_finite


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


@contextmanager
def sending(metrics: Metrics) -> Generator[None, None, None]:
    """Within this context, and once at its end, OpenTelemetry sends the metrics by OTLP/HTTP, as the variables OTEL_*
    say where and how often.

    Raises ConfigError if the variables request a protocol other than http/protobuf.
    """
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.metrics import Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    variables = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    variable = next(filter(os.environ.get, variables), None)
    if variable is not None and os.environ[variable] != "http/protobuf":
        raise ConfigError(
            f"launch.opentelemetry: {variable} is {os.environ[variable]}, but metrics are sent by http/protobuf; set "
            "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL=http/protobuf and OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
        )
    own = {f"starling.run.{key}": value for key, value in metrics.run.items()}
    own |= {"service.name": "starling", "service.instance.id": metrics.run["name"]}
    resource = Resource.create(own).merge(OTELResourceDetector().detect())
    provider = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource)
    meter, recorded = provider.get_meter("starling"), dict[int, Counter[int]]()
    histogram = meter.create_histogram(
        "starling.staleness", "{step}", STALENESS, explicit_bucket_boundaries_advisory=STALENESS_BUCKETS
    )

    def observe(name: str, _: object) -> list[Any]:
        for learner, counts in metrics.staleness().items():  # a histogram has no callback of its own
            for value in (counts - recorded.get(learner, Counter())).elements():
                histogram.record(value, {"learner": str(learner)})
            recorded[learner] = counts
        return [
            Observation(value, {label: str(each) for label, each in labels.items()})
            for other, labels, value in metrics.samples()
            if other == name
        ]

    for name, (kind, unit, text) in FIGURES.items():
        create = meter.create_observable_counter if kind == "counter" else meter.create_observable_gauge
        create(f"starling.{name}", [partial(observe, name)], unit, text)
    try:
        yield
    finally:
        provider.shutdown()
