"""OpenTelemetry and OpenLineage: what collectors get, by their own definitions, and that a collector never matters."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from penstock.errors import ConfigError, FatalError
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.runtime.epochs import EpochReport
from penstock.runtime.telemetry import Telemetry
from penstock.runtime.telemetry.export import outbox as outboxes
from penstock.runtime.telemetry.export.otlp import trace_id
from penstock.runtime.telemetry.export.outbox import Outbox
from penstock.runtime.telemetry.names import METRICS, SECONDS
from penstock.testing import ForkEngine

PIPELINE = """
connector_name = "told"
delivery = "exactly-once"
[processing]
metrics_port = 0
[telemetry]
otlp_endpoint = "{url}"
otlp_headers = {{ authorization = {{ env = "EXPORT_TOKEN" }} }}
openlineage_url = "{url}/api/v1/lineage"
openlineage_token = {{ env = "EXPORT_TOKEN" }}
openlineage_namespace = "shop"
[source]
connector = "generator"
streams = ["orders", "clicks"]
rows = 100
[sink]
name = "lake"
connector = "files"
path = "lake/{{topic}}"
"""


class Collector:
    """Keeps what is posted; answers with `code`."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.code = 200
        self.hold = threading.Event()
        self.hold.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.hold.wait(60)
                if collector.code < 300:
                    collector.got.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                self.send_response(collector.code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def bodies(self, path: str) -> list[bytes]:
        return [body for where, _, body in self.got if where == path]

    def close(self) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < give_up, "it did not come true in time"
        time.sleep(0.02)


def run(directory: Path, url: str) -> Telemetry:
    (directory / "pipeline.toml").write_text(PIPELINE.format(url=url))
    pipeline = Pipeline.from_toml(directory / "pipeline.toml")
    telemetry = Telemetry.of(pipeline)
    supervisor.run(pipeline, ForkEngine(1), drain=True, telemetry=telemetry)
    return telemetry


@pytest.fixture
def told(tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Collector:
    monkeypatch.setenv("EXPORT_TOKEN", "walrus-of-the-collector")
    run(tmp_path, collector.url)
    return collector


def plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def test_an_epoch_is_a_trace_and_its_phases_are_spans(told: Collector) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    resource, spans = None, []
    for body in told.bodies("/v1/traces"):
        for found in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = plain(found.resource.attributes)
            spans += [span for scope in found.scope_spans for span in scope.spans]
    assert resource is not None
    assert (resource["service.name"], resource["service.namespace"]) == ("told", "penstock")
    roots = [span for span in spans if not span.parent_span_id]
    assert [plain(root.attributes)["penstock.epoch"] for root in roots] == list(range(1, len(roots) + 1))
    assert sum(plain(root.attributes)["penstock.rows_in"] for root in roots) == 200
    assert len({root.trace_id for root in roots}) == len(roots)
    for root in roots:
        phases = [span for span in spans if span.parent_span_id == root.span_id]
        assert (len(root.trace_id), len(root.span_id)) == (16, 8)
        assert [phase.name for phase in phases] == ["plan", "stage", "apply", "commit", "ack"]
        assert {phase.trace_id for phase in phases} == {root.trace_id}
        assert phases[0].start_time_unix_nano == root.start_time_unix_nano
        assert phases[-1].end_time_unix_nano == root.end_time_unix_nano
        assert abs(root.end_time_unix_nano / 1e9 - time.time()) < 600
        for before, after in pairwise(phases):
            assert before.start_time_unix_nano <= before.end_time_unix_nano == after.start_time_unix_nano


def test_a_recovered_epoch_goes_on_with_its_trace() -> None:
    one, again = EpochReport(7, incarnation="i"), EpochReport(7, incarnation="i", recovered=True)
    assert trace_id(one) == trace_id(again)
    assert trace_id(one) != trace_id(EpochReport(7, incarnation="j"))


def test_the_metrics_are_those_of_the_scrape(told: Collector) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    request = ExportMetricsServiceRequest.FromString(told.bodies("/v1/metrics")[-1])
    (scope,) = request.resource_metrics[0].scope_metrics
    found = {metric.name: metric for metric in scope.metrics}
    kinds = {"counter": "sum", "gauge": "gauge", "histogram": "histogram"}
    known = {metric.name: metric for metric in METRICS}
    assert set(found) <= set(known)
    assert {"penstock_rows_total", "penstock_epochs_total", "penstock_epoch_seconds", "penstock_state"} <= set(found)
    for name, metric in found.items():
        assert metric.WhichOneof("data") == kinds[known[name].kind]
        for point in getattr(metric, metric.WhichOneof("data")).data_points:
            assert set(plain(point.attributes)) == set(known[name].labels)
    rows = {tuple(plain(p.attributes).values()): p for p in found["penstock_rows_total"].sum.data_points}
    assert rows["in", "generator", ""].as_double == 200
    assert found["penstock_rows_total"].sum.is_monotonic
    assert found["penstock_rows_total"].sum.aggregation_temporality == 2
    assert rows["in", "generator", ""].start_time_unix_nano > 0
    stage = next(
        point
        for point in found["penstock_epoch_seconds"].histogram.data_points
        if plain(point.attributes) == {"phase": "stage"}
    )
    assert list(stage.explicit_bounds) == list(SECONDS)
    assert sum(stage.bucket_counts) == stage.count > 0
    assert len(stage.bucket_counts) == len(stage.explicit_bounds) + 1


def test_the_datasets_of_a_run_are_told_with_their_columns(told: Collector, tmp_path: Path) -> None:
    events = [json.loads(body) for body in told.bodies("/api/v1/lineage")]
    kinds = [event["eventType"] for event in events]
    assert (kinds[0], kinds[-1]) == ("START", "COMPLETE")
    assert set(kinds[1:-1]) <= {"RUNNING"}
    assert len({event["run"]["runId"] for event in events}) == 1
    last = events[-1]
    UUID(last["run"]["runId"])
    assert (last["job"]["namespace"], last["job"]["name"]) == ("shop", "told")
    inputs = {each["name"]: each for each in last["inputs"]}
    outputs = {each["name"]: each for each in last["outputs"]}
    assert set(inputs) == {"orders", "clicks"}
    assert set(outputs) == {str(tmp_path / "lake" / "orders"), str(tmp_path / "lake" / "clicks")}
    orders = outputs[str(tmp_path / "lake" / "orders")]
    assert orders["namespace"] == "file"
    assert {"name": "id", "type": "int64"} in orders["facets"]["schema"]["fields"]
    assert orders["outputFacets"]["outputStatistics"]["rowCount"] == 100
    assert {"name": "id", "type": "int64"} in inputs["orders"]["facets"]["schema"]["fields"]


def test_events_are_what_the_official_client_makes_of_the_same_facts(told: Collector) -> None:
    from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
    from openlineage.client.facet_v2 import (
        job_type_job,
        output_statistics_output_dataset,
        processing_engine_run,
        schema_dataset,
    )
    from openlineage.client.serde import Serde

    makes = {
        "schema": lambda facet: schema_dataset.SchemaDatasetFacet(
            fields=[schema_dataset.SchemaDatasetFacetFields(**each) for each in facet.pop("fields")]
        ),
        "jobType": lambda facet: job_type_job.JobTypeJobFacet(**facet),
        "processing_engine": lambda facet: processing_engine_run.ProcessingEngineRunFacet(**facet),
        "outputStatistics": lambda facet: output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(**facet),
    }

    def facets(found: dict[str, Any]) -> dict[str, Any]:
        return {
            name: makes[name]({key: value for key, value in facet.items() if not key.startswith("_")})
            for name, facet in found.items()
        }

    def bare(value: Any) -> Any:
        """Without what is empty, and without what names the maker and the release of the schema."""
        left_out = ("_producer", "_schemaURL", "schemaURL", "producer")
        if isinstance(value, dict):
            found = {name: bare(each) for name, each in value.items() if name not in left_out}
            return {name: each for name, each in found.items() if each not in ([], {}, None)}
        return [bare(each) for each in value] if isinstance(value, list) else value

    for body in told.bodies("/api/v1/lineage"):
        event = json.loads(body)
        made = RunEvent(
            eventTime=event["eventTime"],
            producer=event["producer"],
            eventType=RunState(event["eventType"]),
            run=Run(event["run"]["runId"], facets(event["run"]["facets"])),
            job=Job(event["job"]["namespace"], event["job"]["name"], facets(event["job"]["facets"])),
            inputs=[
                InputDataset(namespace=each["namespace"], name=each["name"], facets=facets(each["facets"]))
                for each in event["inputs"]
            ],
            outputs=[
                OutputDataset(
                    namespace=each["namespace"],
                    name=each["name"],
                    facets=facets(each["facets"]),
                    outputFacets=facets(each["outputFacets"]),
                )
                for each in event["outputs"]
            ],
        )
        official = json.loads(Serde.to_json(made))
        assert bare(official) == bare(event)
        assert event["schemaURL"].startswith("https://openlineage.io/spec/2-")
        assert event["schemaURL"].endswith("OpenLineage.json#/$defs/RunEvent")
        for facet in event["inputs"][0]["facets"].values():
            assert facet["_schemaURL"] == official["inputs"][0]["facets"]["schema"]["_schemaURL"]


def test_a_run_that_fails_says_so_without_its_secrets(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPORT_TOKEN", "walrus-of-the-collector")

    def fail(*_: object) -> None:
        raise FatalError("no access with walrus-of-the-collector")

    monkeypatch.setattr("penstock.connectors.files.sink.FilesSink.commit_topic", fail)
    with pytest.raises(FatalError):
        run(tmp_path, collector.url)
    last = json.loads(collector.bodies("/api/v1/lineage")[-1])
    assert last["eventType"] == "FAIL"
    assert last["run"]["facets"]["errorMessage"]["message"].startswith("PEN-5000 no access with")
    assert b"walrus" not in b"".join(body for _, _, body in collector.got)


def test_secrets_travel_in_headers_alone(told: Collector) -> None:
    assert {headers["authorization"] for path, headers, _ in told.got if path.startswith("/v1")} == {
        "walrus-of-the-collector"
    }
    assert {headers["authorization"] for path, headers, _ in told.got if path.startswith("/api")} == {
        "Bearer walrus-of-the-collector"
    }
    assert b"walrus" not in b"".join(body for _, _, body in told.got)


@pytest.mark.parametrize("how", ["nobody listens", "it never answers", "it answers 503", "it refuses"])
def test_a_collector_that_is_down_stops_nothing(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("EXPORT_TOKEN", "walrus-of-the-collector")
    monkeypatch.setattr(outboxes, "CLOSE_SECS", 0.5)
    url = collector.url
    if how == "nobody listens":
        collector.close()
    elif how == "it never answers":
        collector.hold.clear()
    else:
        collector.code = 503 if how == "it answers 503" else 400
    telemetry = run(tmp_path, url)
    status = telemetry.status()
    assert status["rows"]["out"] == 200
    assert (status["state"], status["retries"]) == ("running", {})
    assert status["exports"]["otlp-traces"]["sent"] == 0
    if how == "it refuses":
        assert status["exports"]["openlineage"]["dropped"] > 0
        assert 'penstock_exported_total{exporter="openlineage",outcome="dropped"}' in telemetry.metrics().decode()


def test_a_fault_in_what_is_told_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPORT_TOKEN", "walrus-of-the-collector")
    monkeypatch.setattr("penstock.runtime.telemetry.export.openlineage.OpenLineage._event", lambda *_: 1 / 0)
    monkeypatch.setattr(outboxes, "CLOSE_SECS", 0.1)
    assert run(tmp_path, "http://127.0.0.1:9").status()["rows"]["out"] == 200


def test_what_waits_is_sent_once_the_collector_is_back(collector: Collector) -> None:
    collector.code = 503
    outbox: Outbox[str] = Outbox(
        "back", f"{collector.url}/x", lambda items: " ".join(items).encode(), content_type="text/plain"
    )
    outbox.put("one")
    until(lambda: outbox.status()["error"])
    outbox.put("two")
    collector.code = 200
    until(lambda: outbox.status()["sent"] == 2)
    assert b" ".join(collector.bodies("/x")).split() == [b"one", b"two"]
    assert outbox.status()["error"] == ""
    outbox.end()
    outbox.join(60)


def test_what_waits_is_bounded_and_taking_never_waits(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outboxes, "MOST", 10)
    collector.hold.clear()
    outbox: Outbox[int] = Outbox("full", f"{collector.url}/x", lambda items: b"x", content_type="text/plain")
    for number in range(10_000):
        outbox.put(number)
    status = outbox.status()
    assert status["waiting"] == 10
    assert status["dropped"] == 9990


@pytest.mark.parametrize("address", ["collector:4318", "ftp://x", "http://", "http://me:secret@host:4318"])
def test_an_address_that_makes_no_sense_is_refused(tmp_path: Path, address: str) -> None:
    (tmp_path / "pipeline.toml").write_text(PIPELINE.format(url=address))
    with pytest.raises(ConfigError, match="otlp_endpoint") as refused:
        Pipeline.from_toml(tmp_path / "pipeline.toml")
    assert "secret@" not in str(refused.value)


def test_without_the_extra_the_option_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPORT_TOKEN", "walrus-of-the-collector")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.proto.trace.v1.trace_pb2", None)
    with pytest.raises(ConfigError, match=r"PEN-1006") as refused:
        run(tmp_path, "http://127.0.0.1:9")
    assert "penstock[opentelemetry]" in refused.value.hint


@pytest.mark.parametrize(
    ("connector", "options", "name", "expected"),
    [
        ("delta", {"path": "s3://lake/shop/{topic}"}, "/a/b", ("s3://lake", "shop/a/b")),
        ("postgres", {"dsn": "postgresql://me@db:5433/shop"}, "/public/orders", ("postgres://db:5433", "shop.public.orders")),
        ("postgres", {"dsn": "host=db dbname=shop"}, "/orders", ("postgres://db:5432", "shop.public.orders")),
        ("kafka", {"bootstrap_servers": "b1:9092,b2:9092"}, "/lake/orders", ("kafka://b1:9092", "lake.orders")),
    ],
)  # fmt: skip
def test_data_is_named_as_lineage_tools_name_it(
    connector: str, options: dict[str, Any], name: str, expected: tuple[str, str]
) -> None:
    from penstock.pipeline import registry

    config = registry.config_of(registry.load("sink", connector))(**options)
    assert config.dataset(name) == expected  # type: ignore[attr-defined]
