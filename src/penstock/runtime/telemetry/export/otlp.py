"""OpenTelemetry: the metrics of the scrape at intervals, and a trace for each epoch, over OTLP/HTTP."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.errors import ConfigError
from penstock.pipeline.options import TelemetryOptions
from penstock.runtime.telemetry.export.outbox import Every, Outbox
from penstock.runtime.telemetry.names import METRICS, PHASES, SECONDS
from penstock.runtime.telemetry.prometheus import Distribution

if TYPE_CHECKING:
    from penstock.runtime.epochs import EpochReport
    from penstock.runtime.telemetry.telemetry import Telemetry

_PROTOBUF = "application/x-protobuf"
_KIND_INTERNAL = 1
_CUMULATIVE: Any = 2


class Otlp:
    """Sends what a pipeline tells about itself to an OpenTelemetry collector."""

    def __init__(self, telemetry: Telemetry, options: TelemetryOptions) -> None:
        require_package()
        self._telemetry = telemetry
        self._started = time.time_ns()
        endpoint = str(options.otlp_endpoint).rstrip("/")

        def headers() -> dict[str, str]:
            return {name: value.reveal() for name, value in options.otlp_headers.items()}

        common: Any = {"content_type": _PROTOBUF, "headers": headers, "timeout_secs": options.timeout_secs}
        self._traces: Outbox[EpochReport] = Outbox(
            "otlp-traces", f"{endpoint}/v1/traces", self._encode_traces, **common
        )
        self._metrics: Outbox[int] = Outbox("otlp-metrics", f"{endpoint}/v1/metrics", self._encode_metrics, **common)
        self._timer = Every("otlp-timer", options.otlp_interval_secs, lambda: self._metrics.put(time.time_ns()))
        self.outboxes = (self._traces, self._metrics)
        telemetry.on_epoch.append(self._traces.put)

    def end(self, error: BaseException | None) -> None:
        """Put the last numbers into the outbox."""
        self._timer.close()

    def _resource(self) -> Any:
        from opentelemetry.proto.resource.v1.resource_pb2 import Resource

        about = {
            "service.name": self._telemetry.pipeline,
            "service.namespace": "penstock",
            "service.version": __version__,
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
            "host.name": socket.gethostname(),
        }
        return Resource(attributes=_attributes(about))

    # -- traces ------------------------------------------------------------------------------------------------------

    def _encode_traces(self, reports: Sequence[EpochReport]) -> bytes:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
        from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
        from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans

        scope = InstrumentationScope(name="penstock", version=__version__)
        spans = [span for report in reports for span in _spans(report, self._telemetry.pipeline)]
        found = ResourceSpans(resource=self._resource(), scope_spans=[ScopeSpans(scope=scope, spans=spans)])
        return bytes(ExportTraceServiceRequest(resource_spans=[found]).SerializeToString())

    # -- metrics -----------------------------------------------------------------------------------------------------

    def _encode_metrics(self, times: Sequence[int]) -> bytes:
        """The numbers as they are now: of several that wait, only the newest counts."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
        from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics, ScopeMetrics

        scope = InstrumentationScope(name="penstock", version=__version__)
        metrics = list(self._numbers(time.time_ns()))
        found = ResourceMetrics(resource=self._resource(), scope_metrics=[ScopeMetrics(scope=scope, metrics=metrics)])
        return bytes(ExportMetricsServiceRequest(resource_metrics=[found]).SerializeToString())

    def _numbers(self, now: int) -> Any:
        from opentelemetry.proto.metrics.v1 import metrics_pb2 as pb

        points: dict[str, list[Any]] = {}
        for metric, labels, value in self._telemetry.numbers.samples():
            about = _attributes(dict(zip(metric.labels, labels, strict=True)))
            point = pb.NumberDataPoint(attributes=about, time_unix_nano=now, as_double=float(value))
            if metric.kind == "counter":
                point.start_time_unix_nano = self._started
            points.setdefault(metric.name, []).append(point)
        distributions = list(self._telemetry.numbers.histograms())
        for metric in METRICS:
            named: dict[str, Any] = {"name": metric.name, "description": metric.text, "unit": _unit(metric.name)}
            if metric.kind == "histogram":
                of_it = [self._histogram(now, each) for each in distributions if each.metric is metric]
                if of_it:
                    kept = pb.Histogram(data_points=of_it, aggregation_temporality=_CUMULATIVE)
                    yield pb.Metric(**named, histogram=kept)
            elif found := points.get(metric.name):
                if metric.kind == "counter":
                    kept = pb.Sum(data_points=found, aggregation_temporality=_CUMULATIVE, is_monotonic=True)
                    yield pb.Metric(**named, sum=kept)
                else:
                    yield pb.Metric(**named, gauge=pb.Gauge(data_points=found))

    def _histogram(self, now: int, found: Distribution) -> Any:
        from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint

        return HistogramDataPoint(
            attributes=_attributes(dict(zip(found.metric.labels, found.labels, strict=True))),
            start_time_unix_nano=self._started,
            time_unix_nano=now,
            count=sum(found.counts),
            sum=found.sum,
            bucket_counts=found.counts,
            explicit_bounds=SECONDS,
        )


def trace_id(report: EpochReport) -> bytes:
    """The same for each try at an epoch: a restart that finishes one goes on with its trace."""
    return hashlib.sha256(f"{report.incarnation}/{report.number}".encode()).digest()[:16]


def _spans(report: EpochReport, pipeline: str) -> Any:
    """The epoch, and each of its phases; these are laid end to end."""
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    trace, own, at = trace_id(report), os.urandom(8), int(report.began * 1e9)
    spent = {phase: int(report.seconds[phase] * 1e9) for phase in PHASES if phase in report.seconds}
    about: dict[str, str | int | bool] = {
        "penstock.pipeline": pipeline,
        "penstock.incarnation": report.incarnation,
        "penstock.epoch": report.number,
        "penstock.recovered": report.recovered,
        "penstock.rows_in": sum(report.rows_in.values()),
        "penstock.rows_out": sum(each.records_written for each in report.rows_out.values()),
        "penstock.bytes_out": sum(each.bytes_written for each in report.rows_out.values()),
        "penstock.skipped": report.skipped,
        "penstock.dead_letters": sum(report.letters.values()),
    }
    common: dict[str, Any] = {"trace_id": trace, "kind": _KIND_INTERNAL}
    yield Span(
        **common,
        span_id=own,
        name="epoch",
        start_time_unix_nano=at,
        end_time_unix_nano=at + sum(spent.values()),
        attributes=_attributes(about),
    )
    for phase, length in spent.items():
        yield Span(
            **common,
            span_id=os.urandom(8),
            parent_span_id=own,
            name=phase,
            start_time_unix_nano=at,
            end_time_unix_nano=at + length,
        )
        at += length


def _attributes(values: Mapping[str, str | int | bool]) -> list[Any]:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

    def value(given: str | int | bool) -> Any:
        if isinstance(given, bool):
            return AnyValue(bool_value=given)
        return AnyValue(int_value=given) if isinstance(given, int) else AnyValue(string_value=given)

    return [KeyValue(key=name, value=value(given)) for name, given in values.items()]


def _unit(name: str) -> str:
    plain = name.removesuffix("_total")
    return "s" if plain.endswith("_seconds") else "By" if plain.endswith("_bytes") else "1"


def require_package() -> None:
    """Refuse to start without what encodes the messages."""
    try:
        import opentelemetry.proto.trace.v1.trace_pb2  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "otlp_endpoint needs a package that is not installed",
            code="PEN-1006",
            hint="pip install 'penstock[opentelemetry]'",
        ) from error
