"""Figures of a run for other programs: curves for TensorBoard, and metrics for Prometheus.

Both use only what learners report anyway. A scrape reads the roster; learners send nothing for it.
"""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
_Sample = tuple[bool, str, str, Mapping[str, object], float | None]
"""Sample of a metric: whether it is a counter, else a gauge; name, description, labels; and the value, if there is one
yet."""


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
                counts = record.done.staleness
                most_of = {str(float(most)): most for most in STALENESS_BUCKETS} | {"+Inf": math.inf}
                buckets = [
                    (name, sum(count for value, count in counts.items() if value <= most))
                    for name, most in most_of.items()
                ]
                total = sum(value * count for value, count in counts.items())
                staleness.add_metric([str(record.learner_id)], buckets, total)
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
    if (goodput := goodput_of(roster)) is not None:
        yield False, "goodput_ratio", "The share of the machines' time spent on gradients and steps.", {}, goodput.ratio
        for cause, part in goodput.losses.items():
            yield False, "goodput_loss_ratio", "The share of the machines' time lost.", {"cause": cause}, part


def _of_learner(roster: Roster, record: LearnerRecord) -> Iterator[_Sample]:
    own, done, newest, attempt = {"learner": record.learner_id}, record.done, record.newest, record.attempt
    waited = roster.clock() - attempt.wait_began_at if attempt.wait else 0.0
    rate, audio_rate = (newest.learning_rate, newest.new.audio_rate) if newest is not None else (None, None)
    yield True, "steps", "Mini-batches computed.", own, record.num_steps
    yield True, "samples", "Examples computed.", own, done.examples
    yield True, "frames", "Frames computed.", own, done.frames
    yield False, "loss", "Training loss in the last report.", own, record.loss
    yield False, "learning_rate", "The learning rate in the last report.", own, rate
    text = "Seconds of audio trained on per second in the last report."
    yield False, "audio_seconds_per_second", text, own, audio_rate
    yield False, "silence_seconds", "The time since the last message.", own, roster.since_heard(record)
    yield False, "wait_seconds", "How long the present wait has lasted; waits below 1 s count as 0.", own, waited
    yield True, "computing_seconds", "Time spent on gradients and steps.", own, done.computing
    for what, seconds in (("data", done.waiting_for_data), ("peers", done.waiting_for_peers)):
        yield True, "waiting_seconds", "Time spent waiting for data or peers.", {**own, "what": what}, seconds
    yield True, "rounds", "Averaging rounds, up to the last epoch.", own, done.rounds
    yield True, "sent_bytes", "Bytes sent to other learners, up to the last epoch.", own, done.bytes_sent
    text = "Gradients left out because they were not finite, up to the last epoch."
    yield True, "gradients_not_finite", text, own, done.num_not_finite


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
