"""What an OpenTelemetry collector gets of a run. A server on loopback decodes it with OpenTelemetry's own messages."""

import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

import starling
from starling import errors
from starling.errors import ConfigError, MissingExtraError
from starling.launch.messages import Heartbeat
from starling.reporting.metrics import STALENESS_BUCKETS, sending, serving
from starling.training.faults import Kill
from tests.launch.ray_job import BATCHES, make_job
from tests.report.test_metrics import END, PROGRESS, Scrape, Served

service = pytest.importorskip(
    "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2",
    reason="the extra [opentelemetry] is not installed",
)
SUFFIXES = {"s": "_seconds", "By": "_bytes", "1": "_ratio", "s/s": "_seconds_per_second"}
"""As OpenTelemetry's compatibility rules for Prometheus write these units."""


class Collector:
    """The requests that an OTLP/HTTP receiver got, decoded."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/metrics" and self.headers["Content-Type"] == "application/x-protobuf"
                collector.requests.append(service.ExportMetricsServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def metrics(self, request: int = -1) -> list[Any]:
        """The metrics of a request."""
        (resource,) = self.requests[request].resource_metrics
        (scope,) = resource.scope_metrics
        return list(scope.metrics)

    def resource(self) -> dict[str, str]:
        (resource,) = self.requests[-1].resource_metrics
        return {each.key: each.value.string_value for each in resource.resource.attributes}

    def as_scraped(self, request: int = -1) -> Scrape:
        """What Prometheus would make of a request, by OpenTelemetry's rules."""
        found: Scrape = {}
        for metric in self.metrics(request):
            kind = metric.WhichOneof("data")
            name = metric.name.replace(".", "_") + SUFFIXES.get(metric.unit, "")
            for point in getattr(metric, kind).data_points:
                values = {each.key: each.value.string_value for each in point.attributes}
                labels = ",".join(values[key] for key in sorted(values))
                if kind == "histogram":
                    assert tuple(point.explicit_bounds) == STALENESS_BUCKETS
                    so_far = 0
                    for most, count in zip([*map(float, STALENESS_BUCKETS), "+Inf"], point.bucket_counts, strict=True):
                        so_far += count
                        key = ",".join(str(value) for _, value in sorted({**values, "le": most}.items()))
                        found.setdefault(f"{name}_bucket", {})[key] = float(so_far)
                    found.setdefault(f"{name}_count", {})[labels] = float(point.count)
                    found.setdefault(f"{name}_sum", {})[labels] = point.sum
                    continue
                if kind == "sum":
                    assert metric.sum.is_monotonic
                value = getattr(point, point.WhichOneof("value"))
                found.setdefault(name + ("_total" if kind == "sum" else ""), {})[labels] = float(value)
        return found


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{made.server.server_port}")
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def test_a_collector_gets_the_figures_of_a_scrape_under_names_that_give_the_same(collector: Collector) -> None:
    """By OpenTelemetry's rules for Prometheus, and each value, label and bucket too."""
    served = Served()
    served.hear(0, Heartbeat(num_steps=5), PROGRESS, END)
    served.roster.lose(1, "learner 1 was killed")
    with serving(served.metrics, "127.0.0.1", 0) as served.port, sending(served.metrics):
        expected = served.scrape()
    assert expected.pop("starling_run_info") == {"digits,adpsgd": 1.0}
    assert expected["starling_staleness_count"]["0"] == 10.0 and expected["starling_deaths_total"] == {"": 1.0}
    for of_nothing in ("bucket", "count", "sum"):  # a histogram without values is not sent
        named = expected[f"starling_staleness_{of_nothing}"]
        expected[f"starling_staleness_{of_nothing}"] = {
            labels: value for labels, value in named.items() if labels.split(",")[-1] != "1"
        }
    found = collector.as_scraped()
    assert found == expected
    assert all(metric.description.endswith(".") for metric in collector.metrics())


def test_the_variables_of_opentelemetry_name_the_service(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them, the service is starling, and its instance the run."""
    with sending(Served().metrics):
        pass
    ours = {
        "service.name": "starling",
        "service.instance.id": "digits",
        "starling.run.name": "digits",
        "starling.run.strategy": "adpsgd",
    }
    assert ours.items() <= collector.resource().items()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "asr")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=seven,team=speech")
    with sending(Served().metrics):
        pass
    theirs = {**ours, "service.name": "asr", "service.instance.id": "seven", "team": "speech"}
    assert theirs.items() <= collector.resource().items()


def test_opentelemetry_can_be_disabled_by_its_own_variable(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with sending(Served().metrics):
        pass
    assert collector.requests == []


def test_another_protocol_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable for metrics is stronger than that for all signals."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match=r"launch.opentelemetry: OTEL_EXPORTER_OTLP_PROTOCOL is grpc"):
        sending(Served().metrics).__enter__()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with sending(Served().metrics):
        pass


def test_a_run_without_the_extra_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where not even the package exists that would contain the exporter."""
    find = errors.find_spec

    def without(name: str) -> object:
        if name == "opentelemetry.exporter.otlp.proto.http":
            raise ModuleNotFoundError(name)
        return find(name)

    monkeypatch.setattr(errors, "find_spec", without)
    missing = r"launch.opentelemetry needs opentelemetry.exporter.otlp.proto.http: .*\[opentelemetry\]"
    with pytest.raises(MissingExtraError, match=missing):
        starling.train(make_job(tmp_path / "slow"), 2, exp=tmp_path, launch={"opentelemetry": True})


def test_a_run_of_real_learners_is_sent(collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One of two dies on purpose. Metrics are sent during the run, no counter of steps falls, and the last request
    has all steps."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # learners would import pytest
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    job = replace(make_job(tmp_path / "absent", epochs=1), faults=(Kill(kill=1, at_step=2),))
    starling.train(job, 2, exp=tmp_path, engine={"threads": 1}, launch={"opentelemetry": True})
    assert len(collector.requests) > 2
    every = [collector.as_scraped(number) for number in range(len(collector.requests))]
    assert every[-1]["starling_deaths_total"] == {"": 1.0}
    for learner in ("0", "1"):
        counts = [found["starling_steps_total"][learner] for found in every]
        assert counts == sorted(counts)
    steps = every[-1]["starling_steps_total"]["0"]
    assert BATCHES - 2 <= steps <= BATCHES  # learner 1 has done at most two
    assert every[-1]["starling_samples_total"]["0"] == 20.0 * steps
    assert collector.resource()["starling.run.name"] == "run"


def test_a_run_ends_well_without_a_collector(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenTelemetry's log says so."""
    closed = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    closed.server_close()
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{closed.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with caplog.at_level(logging.ERROR, "opentelemetry"):
        starling.train(
            make_job(tmp_path / "absent", epochs=1),
            1,
            exp=tmp_path,
            engine={"threads": 1},
            launch={"opentelemetry": True},
            console=Console(quiet=True),
        )
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    assert "Failed to export metrics batch" in caplog.text
