"""What Prometheus gets of a run. Its client library's own parser reads it."""

import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import ModuleType
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml
from rich.console import Console

import starling
from starling import errors
from starling.engines.processes.stalls import Stall
from starling.errors import ConfigError, MissingExtraError
from starling.launch.messages import Heartbeat, LearnerMessage, Progress, Reached, Stretch
from starling.launch.roster import Roster
from starling.reporting.epochs import merged
from starling.reporting.metrics import Metrics, serving
from starling.training.faults import Kill
from starling.training.membership import Membership
from tests.launch.ray_job import make_job
from tests.test_documents import ROOT

parser = pytest.importorskip("prometheus_client.parser", reason="the extra [monitoring] is not installed")
Scrape = dict[str, dict[str, float]]
"""By metric and the values of its labels, joined by commas."""
LONGEST = 100.0


def scraped(port: int) -> Scrape:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found: Scrape = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.type in ("counter", "gauge", "histogram", "info") and family.documentation.endswith(".")
        for sample in family.samples:
            labels = ",".join(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


STRETCH = Stretch(
    learner=0,
    end=60.0,
    seconds=10.0,
    step=9,
    batches=4,
    examples=16,
    frames=300,
    losses=750.0,
    audio=400.0,
    computing=6.0,
    waiting_for_data=1.0,
    waiting_for_peers=3.0,
)
PROGRESS = Progress(
    learner_id=0, new=STRETCH, so_far=STRETCH, batch=4, num_batches=10, learning_rate=0.125, fraction=0.25
)
REST = Stretch(
    learner=0,
    end=60.0,
    computing=1.0,
    waiting_for_data=0.5,
    waiting_for_peers=0.5,
    rounds=5,
    bytes_sent=4096,
    staleness=Counter({0: 6, 1: 3, 3: 1}),
    num_not_finite=1,
)
"""The time after the last gradient of an epoch, and what is counted at its end."""
END = Progress(learner_id=0, new=REST, so_far=merged([STRETCH, REST]), ended_at=10)


def following(computing: float, for_peers: float) -> Progress:
    """Another progress that took so long."""
    new = replace(STRETCH, computing=computing, waiting_for_data=0.0, waiting_for_peers=for_peers)
    return replace(PROGRESS, new=new, so_far=new, epoch=1)


class Served:
    """The metrics of two learners whose messages the test makes up."""

    def __init__(self) -> None:
        self.roster = Roster(2, clock=lambda: 100.0)
        self.metrics = Metrics(self.roster, "digits", "adpsgd")
        self.port = 0

    def hear(self, learner_id: int, *messages: LearnerMessage) -> None:
        for message in messages:
            self.roster.hear(learner_id, message)

    def scrape(self) -> Scrape:
        return scraped(self.port)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    with serving(made.metrics, "127.0.0.1", 0) as made.port:
        yield made


def test_a_scrape_before_anything_was_reported_has_all_learners_and_no_loss(served: Served) -> None:
    """Counters exist from the start, so that `rate()` sees their first increase."""
    found = served.scrape()
    assert found["starling_run_info"] == {"digits,adpsgd": 1.0}
    assert found["starling_learners_alive"] == {"": 2.0}
    assert found["starling_steps_total"] == {"0": 0.0, "1": 0.0}
    assert found["starling_deaths_total"] == found["starling_joins_total"] == {"": 0.0}
    assert "starling_loss" not in found


def test_what_learners_report_is_what_prometheus_gets(served: Served) -> None:
    """Heartbeats bring steps and waits, progress losses and sums, ends of epochs what is known only then."""
    stall = Stall("a mean", (1,), True, False, 4.0, 0.5, 7)
    served.hear(0, Heartbeat(num_steps=5, stall=stall), PROGRESS)
    found = served.scrape()
    for name, value in {
        "steps_total": 5.0,
        "samples_total": 16.0,
        "frames_total": 300.0,
        "loss": 2.5,
        "learning_rate": 0.125,
        "audio_seconds_per_second": 40.0,
        "computing_seconds_total": 6.0,
        "wait_seconds": 4.0,
        "sent_bytes_total": 0.0,
    }.items():
        assert found[f"starling_{name}"]["0"] == value, name
    assert found["starling_progress_ratio"] == {"": 0.25}
    assert found["starling_waiting_seconds_total"] == {"0,data": 1.0, "0,peers": 3.0, "1,data": 0.0, "1,peers": 0.0}
    served.hear(0, END, following(0.5, 0.25))
    found = served.scrape()
    assert found["starling_samples_total"]["0"] == 32.0
    assert found["starling_computing_seconds_total"]["0"] == 7.5
    assert found["starling_waiting_seconds_total"] == {
        "0,data": 1.5,
        "0,peers": 3.75,
        "1,data": 0.0,
        "1,peers": 0.0,
    }
    assert found["starling_rounds_total"]["0"] == 5.0 and found["starling_sent_bytes_total"]["0"] == 4096.0
    assert found["starling_gradients_not_finite_total"]["0"] == 1.0
    buckets = found["starling_staleness_bucket"]
    assert (buckets["0.0,0"], buckets["1.0,0"], buckets["2.0,0"], buckets["4.0,0"]) == (6.0, 9.0, 9.0, 10.0)
    assert found["starling_staleness_count"]["0"] == 10.0
    assert found["starling_staleness_sum"]["0"] == pytest.approx(6.0)


def test_counters_never_fall_where_a_learner_is_restarted_in_the_middle_of_an_epoch(served: Served) -> None:
    """Prometheus would take that for a restart of the run."""
    served.hear(0, Heartbeat(num_steps=5), PROGRESS)
    served.roster.start(0, is_joiner=True)
    served.hear(0, Reached("ready", -1), Heartbeat(num_steps=2), following(1.0, 0.5))
    found = served.scrape()
    assert found["starling_steps_total"]["0"] == 7.0
    assert found["starling_computing_seconds_total"]["0"] == 7.0
    assert found["starling_waiting_seconds_total"]["0,peers"] == 3.5


def test_deaths_and_joins_are_counted(served: Served) -> None:
    """A learner that was lost is not alive, and keeps its figures."""
    served.hear(1, Heartbeat(num_steps=3))
    served.roster.lose(1, "learner 1 was killed")
    served.roster.announce(Membership(1, (0, 2)))
    served.roster.start(2, is_joiner=True)
    served.hear(2, Reached("ready", -1), Reached("entered", 1))
    served.roster.lose(2)
    found = served.scrape()
    assert found["starling_deaths_total"] == found["starling_joins_total"] == {"": 1.0}
    assert found["starling_learners_alive"] == found["starling_membership"] == {"": 1.0}
    assert found["starling_steps_total"]["1"] == 3.0


def test_it_listens_where_it_was_told_to_and_a_port_in_use_is_one_clear_error(served: Served) -> None:
    """On loopback only; nothing listens once the run is over."""
    in_use = pytest.raises(ConfigError, match=rf"launch.metrics_port: nothing can listen on 127.0.0.1:{served.port} ")
    with in_use, serving(served.metrics, "127.0.0.1", served.port):
        pass
    with serving(served.metrics, "127.0.0.1", 0) as port:
        assert scraped(port)
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def test_a_run_without_the_extra_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the command that installs it."""
    find = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "prometheus_client" else find(name))
    with pytest.raises(MissingExtraError, match=r"launch.metrics_port needs prometheus_client: .*\[monitoring\]"):
        starling.train(make_job(tmp_path / "slow"), 2, exp=tmp_path, launch={"metrics_port": 0})


def has_learned(found: Scrape) -> bool:
    """Whether learner 0 has said its loss, and that it has taken a step: these come at different times."""
    names = ("starling_loss", "starling_steps_total", "starling_samples_total")
    return all(found.get(name, {}).get("0", 0.0) > 0.0 for name in names)


def test_a_run_of_real_learners_can_be_scraped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One of two dies on purpose: its death, and the steps of both, are in a scrape; after the run, nothing listens."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # learners would import pytest
    slow, said = tmp_path / "slow", StringIO()
    slow.touch()
    job = replace(make_job(slow, epochs=1), faults=(Kill(kill=1, at_step=2),))

    def train() -> None:
        starling.train(job, 2, exp=tmp_path, engine={"threads": 1}, launch={"metrics_port": 0}, console=console)

    console = Console(file=said, width=200)
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    deadline, port, found = time.monotonic() + LONGEST, 0, Scrape()
    while thread.is_alive() and time.monotonic() < deadline:
        if port == 0 and "/metrics" in (text := said.getvalue()):
            port = int(text.split("http://127.0.0.1:")[1].split("/")[0])
        found = scraped(port) if port else {}
        if found and found["starling_deaths_total"][""] and has_learned(found):
            break
        time.sleep(0.1)
    assert found, said.getvalue()
    assert found["starling_run_info"] == {"run,adpsgd": 1.0}
    assert (found["starling_deaths_total"][""], found["starling_learners_alive"][""]) == (1.0, 1.0)
    assert found["starling_steps_total"]["0"] > 0.0
    assert found["starling_samples_total"]["0"] % 20.0 == 0.0 < found["starling_samples_total"]["0"]
    slow.unlink()
    thread.join(LONGEST)
    assert not thread.is_alive(), said.getvalue()
    with pytest.raises(URLError):
        scraped(port)


def test_the_example_for_prometheus_scrapes_the_port_of_the_page() -> None:
    """`promtool` is not here: the fields that Prometheus requires, by hand."""
    config = yaml.safe_load((ROOT / "examples" / "prometheus.yml").read_text(encoding="utf-8"))
    assert set(config) == {"global", "scrape_configs"}
    (job,) = config["scrape_configs"]
    assert set(job) == {"job_name", "static_configs"} and job["job_name"] == "starling"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9400"]}]
    assert "launch.metrics_port=9400" in (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
