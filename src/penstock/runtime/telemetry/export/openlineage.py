"""OpenLineage: which datasets a run reads and writes, with their columns, as events over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

from penstock import __version__
from penstock.abilities import Named
from penstock.durable import Json
from penstock.errors import ConnectorError, without_secrets
from penstock.pipeline import Pipeline
from penstock.runtime.telemetry.export.outbox import Outbox
from penstock.source import Connector

if TYPE_CHECKING:
    from penstock.runtime.epochs import EpochReport
    from penstock.runtime.telemetry.telemetry import Telemetry

PRODUCER = f"urn:penstock:{__version__}"

_SPEC = "https://openlineage.io/spec"
_EVENT = f"{_SPEC}/2-0-2/OpenLineage.json#/$defs/RunEvent"
_FACETS = {
    "schema": "1-2-0/SchemaDatasetFacet",
    "outputStatistics": "1-0-2/OutputStatisticsOutputDatasetFacet",
    "jobType": "2-0-3/JobTypeJobFacet",
    "processing_engine": "1-1-1/ProcessingEngineRunFacet",
    "errorMessage": "1-0-1/ErrorMessageRunFacet",
}
"""The version of each facet that is sent."""


class OpenLineage:
    """
    A run of the pipeline is a run of a streaming job.

    START comes with the first committed epoch, when the datasets are known; RUNNING when columns or datasets change, and at
    intervals; COMPLETE or FAIL at the end.
    """

    def __init__(self, telemetry: Telemetry, pipeline: Pipeline) -> None:
        options = pipeline.telemetry
        self._telemetry = telemetry
        self._pipeline = pipeline
        self._namespace = options.openlineage_namespace
        self._interval = options.openlineage_interval_secs
        self._run = str(uuid4())
        self._last: tuple[float, Json] | None = None

        def headers() -> dict[str, str]:
            token = options.openlineage_token
            return {"Authorization": f"Bearer {token.reveal()}"} if token is not None else {}

        self._outbox: Outbox[Json] = Outbox(
            "openlineage",
            str(options.openlineage_url),
            lambda events: json.dumps(events[0], ensure_ascii=False).encode(),
            content_type="application/json",
            headers=headers,
            timeout_secs=options.timeout_secs,
            at_once=1,
        )
        self.outboxes = (self._outbox,)
        telemetry.on_epoch.append(self._epoch)

    def end(self, error: BaseException | None) -> None:
        """Put the last event into the outbox."""
        if self._last is None:
            self._outbox.put(self._event("START"))
        self._outbox.put(self._event("COMPLETE" if error is None else "FAIL", error))

    def _epoch(self, report: EpochReport) -> None:
        now, known = time.monotonic(), self._known()
        if self._last is not None and self._last[1] == known and now - self._last[0] < self._interval:
            return
        self._outbox.put(self._event("START" if self._last is None else "RUNNING"))
        self._last = (now, known)

    def _known(self) -> Json:
        looks = self._telemetry.looks
        return [looks.streams(), looks.flows(), looks.schemas()]

    def _event(self, kind: str, error: BaseException | None = None) -> Json:
        status = self._telemetry.status()
        engine = {"version": status["versions"].get("pyspark", ""), "name": "spark"}
        run = {"processing_engine": _facet("processing_engine", **engine, openlineageAdapterVersion=__version__)}
        if error is not None:
            run["errorMessage"] = _facet(
                "errorMessage",
                message=without_secrets(str(error)) or type(error).__name__,
                programmingLanguage="python",
            )
        job = _facet("jobType", processingType="STREAMING", integration="PENSTOCK", jobType="PIPELINE")
        return {
            "eventType": kind,
            "eventTime": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "producer": PRODUCER,
            "schemaURL": _EVENT,
            "run": {"runId": self._run, "facets": run},
            "job": {"namespace": self._namespace, "name": self._pipeline.name, "facets": {"jobType": job}},
            "inputs": list(self._inputs()),
            "outputs": list(self._outputs(status)),
        }

    def _inputs(self) -> Iterator[Json]:
        for (source, stream), columns in self._telemetry.looks.streams().items():
            yield {**_named(self._pipeline.sources.get(source), stream), "facets": {"schema": _columns(columns)}}

    def _outputs(self, status: Mapping[str, Json]) -> Iterator[Json]:
        schemas = self._telemetry.looks.schemas()
        for topic, sink in sorted({(topic, sink) for _, topic, sink in self._telemetry.looks.flows()}):
            written = status["sinks"].get(sink, {}).get("topics", {}).get(topic, {})
            counted = _facet("outputStatistics", rowCount=written.get("rows", 0), size=written.get("bytes", 0))
            yield {
                **_named(self._pipeline.sinks.get(sink), topic),
                "facets": {"schema": _columns(schemas.get(topic, {}))},
                "outputFacets": {"outputStatistics": counted},
            }


def _facet(facet: str, /, **values: Json) -> Json:
    kind = _FACETS[facet].partition("/")[2]
    return {"_producer": PRODUCER, "_schemaURL": f"{_SPEC}/facets/{_FACETS[facet]}.json#/$defs/{kind}", **values}


def _columns(columns: Mapping[str, str]) -> Json:
    return _facet("schema", fields=[{"name": name, "type": kind} for name, kind in columns.items()])


def _named(connector: Connector[Any] | None, name: str) -> Json:
    """How lineage tools call the data of a stream or topic; the same data has one name for all who read or write it."""
    config = getattr(connector, "config", None)
    if isinstance(config, Named):
        try:
            namespace, own = config.dataset(name)
            return {"namespace": namespace, "name": own}
        except ConnectorError:
            pass  # such as a topic that the sink has no place for: then it has no name out there
    url = urlsplit(str(getattr(config, "url", "") or ""))
    if url.hostname:
        port = f":{url.port}" if url.port else ""
        return {"namespace": f"{url.scheme}://{url.hostname}{port}", "name": name}
    return {"namespace": f"penstock://{getattr(type(connector), 'name', 'unknown')}", "name": name}
