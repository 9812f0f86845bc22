"""From one TOML file to a checked pipeline."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.durable import Json
from penstock.errors import ConfigError
from penstock.pipeline import checks, registry, shape
from penstock.pipeline.checks import PipelineError, Problem
from penstock.pipeline.options import Processing, TelemetryOptions
from penstock.pipeline.routing import OnError, Router
from penstock.pipeline.schemas import TopicSchemas
from penstock.pipeline.shape import compare_shapes
from penstock.sink import DeliveryGuarantee, SinkConnector
from penstock.source import SourceConnector

__all__ = ["Pipeline", "PipelineError", "Problem", "Processing", "compare_shapes"]

if TYPE_CHECKING:
    from penstock.runtime.supervisor import Summary


@dataclass(frozen=True)
class Pipeline:
    """A checked pipeline: connectors made, not opened."""

    name: str
    sources: Mapping[str, SourceConnector[Any]]
    sinks: Mapping[str, SinkConnector[Any, Any]]
    router: Router
    delivery: DeliveryGuarantee = DeliveryGuarantee.AT_LEAST_ONCE
    processing: Processing = field(default_factory=Processing)
    schemas: TopicSchemas = field(default_factory=TopicSchemas)
    on_error: Mapping[str, OnError] = field(default_factory=dict)
    """Sources that say themselves what becomes of their bad records."""
    file: Path | None = None
    """The file it was read from, if any."""
    telemetry: TelemetryOptions = field(default_factory=TelemetryOptions)
    """Where a run sends what it tells about itself."""

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str] | None = None) -> Pipeline:
        """Read and check a file, by default the one that `CONNECTOR_CONFIG_PATH` names; all its errors come at once."""
        chosen = path or os.environ.get("CONNECTOR_CONFIG_PATH")
        if not chosen:
            raise ConfigError(
                "no pipeline file was given", code="PEN-1015", hint="name one, or set CONNECTOR_CONFIG_PATH"
            )
        from penstock.pipeline import file, toml  # here, since `file` imports this module

        return file.Reader(toml.read(Path(os.path.abspath(chosen)))).pipeline()

    @property
    def base(self) -> Path | None:
        """The directory of the file, from which relative paths and modules are found."""
        return self.file.parent if self.file else None

    @property
    def notices(self) -> list[str]:
        """What this pipeline does not promise, said before it starts."""
        return list(checks.notices(self))

    @property
    def third_party(self) -> list[Path]:
        """Files and package directories that executors need besides Penstock."""
        transforms = [registry.load_object(r.transform, self.base) for r in self.router.routes if r.transform]
        connectors = [type(each) for each in (*self.sources.values(), *self.sinks.values())]
        return registry.third_party_modules([*connectors, *transforms], self.base)

    def validate(self) -> None:
        """Refuse a pipeline that cannot keep its promises; a file's pipeline is checked already."""
        problems = [
            *checks.name_problems("a pipeline's name", self.name, ()),
            *(p for name in self.sources for p in checks.name_problems("a source's name", name, ("sources", name))),
            *(p for name in self.sinks for p in checks.name_problems("a sink's name", name, ("sinks", name))),
            *([] if self.sources else [Problem("PEN-1004", "a pipeline needs a source")]),
            *([] if self.sinks else [Problem("PEN-1004", "a pipeline needs a sink")]),
            *checks.route_problems(self.router.routes, self.sources, self.sinks, self.base),
            *checks.sink_problems(self),
            *checks.evolution_problems(self),
            *checks.letter_problems(self.processing.dead_letter_sink, list(self.sinks)),
            *checks.letter_store_problems(self),
            *checks.delivery_problems(self),
        ]
        checks.refuse(problems, f"the pipeline {self.name!r}")

    def check_streams(self, streams: Mapping[str, Iterable[str]]) -> list[Problem]:
        """What is wrong once each source's streams are known, as after `open`: streams that meet, streams without a route."""
        return list(checks.stream_problems(self, streams))

    def require_streams(self, streams: Mapping[str, Iterable[str]]) -> None:
        """Refuse what `check_streams` finds."""
        checks.refuse(self.check_streams(streams), f"the pipeline {self.name!r}")

    def shape(self) -> Json:
        """What a later run is compared with, see `shape.compare_shapes`; holds no secrets and no connection details."""
        return shape.shape_of(self.name, self.sources, self.sinks, self.router, self.delivery, self.base)

    def run(self, spark: Any = None, drain: bool = False) -> Summary:
        """Run until stopped, or with `drain` until all that is there now is committed; in the caller's session if given."""
        self.validate()
        # The one step from a pipeline to what runs it: a convenience for those who call it from Python.
        from penstock.runtime import supervisor
        from penstock.spark import engine_for
        from penstock.web import serve

        return supervisor.run(self, engine_for(self, spark), drain=drain, serve=serve)
