"""What `penstock check` shows when asked: the columns of each topic beside those of its targets, and a few rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.terminal import listing
from penstock.durable import Json
from penstock.errors import ConfigError, ConnectorError, printable
from penstock.pipeline import Pipeline
from penstock.pipeline.routing import Target
from penstock.runtime import readiness
from penstock.runtime.epochs import State
from penstock.runtime.messages.codecs import Codecs
from penstock.runtime.messages.decoding import Decoders
from penstock.runtime.messages.foreseen import lives_with, message_targets
from penstock.runtime.sampling import Sample, sample
from penstock.schema.codec import unpack_schema
from penstock.sink import Topic
from penstock.source import ENVELOPE_SCHEMA, Finding, RangeSource, Schemas, SourceConnector

_WIDEST = 40
"""Characters of a value that are shown."""


def targets(pipeline: Pipeline, source: str, stream: str) -> tuple[Target, ...]:
    """Where a stream goes; nowhere if it has no place, which `check_streams` reports."""
    try:
        return pipeline.router.targets(source, stream)
    except ConfigError:
        return ()


class Looks:
    """Gathers columns and rows while the connectors are open, and shows them afterwards."""

    def __init__(self, pipeline: Pipeline, sample_rows: int = 0) -> None:
        self.pipeline = pipeline
        self.targets: dict[tuple[str, Topic], pa.Schema | None] = {}
        """Per sink and topic the columns that the target has; None: it takes any."""
        self._rows = sample_rows
        self._samples: dict[str, Sample] = {}

    def decoders(self) -> Decoders:
        """What a run would decode with; nothing where the registry does not say, which is a finding of its own."""
        with contextlib.suppress(ConnectorError):
            codecs = Codecs(self.pipeline.schemas, self.pipeline.processing.state_dir)
            made, unusable = codecs.decoders_unregistered(), [each for each, _ in codecs.unusable()]
            usable = tuple(each for each in made.schemas.entries if each not in unusable)
            return replace(made, schemas=replace(made.schemas, entries=usable))
        return Decoders()

    def take(self, name: str, source: SourceConnector[Any]) -> Iterator[Finding]:
        """Read a sample of a source that is open; what fails is a finding."""
        if not self._rows:
            return
        if not isinstance(source, RangeSource) and readiness.runs(self.pipeline):
            what = "no sample while the pipeline runs: two readers would take each other's messages"
            yield Finding(True, what, "penstock peek TOPIC FILE shows what has arrived")
            return
        try:
            self._samples[name] = sample(self.pipeline, name, source, self._rows)
        except ConnectorError as error:
            yield Finding(False, f"no sample: {error.code} {error.message}", error.hint)

    def rows(self) -> list[Json]:
        """The samples as JSON: a list of rows per topic."""
        found = []
        for name, taken in self._samples.items():
            for target, stream, batch in taken.rows:
                about = {"source": name, "stream": stream, "topic": target.topic, "sinks": list(target.sinks)}
                found.append({**about, "rows": batch.to_pylist()})
            bad = [{"stream": b.stream, "topic": b.topic, "code": b.code, "reason": b.reason} for b in taken.bad]
            found += [{"source": name, "bad": bad}] if bad else []
        return found

    def show_rows(self, console: Console) -> None:
        """Print the samples, a table for each topic."""
        for name, taken in self._samples.items():
            for target, stream, batch in taken.rows:
                route = target.route
                how = ", before its SQL" if route.sql else f", before {route.transform}" if route.transform else ""
                head = Text.assemble((f"{name}:{printable(stream)} → ", "dim"), (target.topic, "cyan"))
                console.print(head.append(f"  {batch.num_rows} rows{how}", style="dim"), soft_wrap=True)
                table = Table(*map(printable, batch.schema.names), box=None, header_style="dim", padding=(0, 2, 0, 0))
                for row in batch.to_pylist():
                    table.add_row(*(_cell(row[column]) for column in batch.schema.names))
                console.print(table)
            for bad in taken.bad:
                console.print(
                    Text(f"  ✗ {bad.stream}: {bad.code} {printable(bad.reason)}", style="red"), soft_wrap=True
                )
            if taken.unrouted:
                console.print(Text(f"  {taken.unrouted} rows of {name} that no route takes", style="yellow"))
            if not taken.rows and not taken.bad:
                console.print(Text(f"{name} has no rows to show", style="dim"))
        console.print(Text("read for this sample alone: nothing was acknowledged or committed", style="dim"))

    def columns(self, streams: Mapping[str, Schemas]) -> dict[Topic, Json]:
        """Per topic its columns, each with its type here and in the targets; None: the target does not have it yet."""
        found: dict[Topic, Json] = {}
        decoders = replace(self.decoders(), columns=self._inferred())

        def add(target: Target, schema: pa.Schema | None) -> None:
            there = {sink: self.targets.get((sink, target.topic)) for sink in target.sinks}
            found[target.topic] = {
                "sinks": list(target.sinks),
                "columns": None
                if schema is None
                else {each.name: {"type": str(each.type), **_types(each.name, there)} for each in schema},
            }

        for source, known in streams.items():
            for stream, given in sorted(known.items()):
                for target in targets(self.pipeline, source, stream):
                    add(target, decoders.schema(target.topic, given))
        for target in message_targets(decoders, self.pipeline.router, self.pipeline.sources, streams):
            add(target, decoders.schema(target.topic, ENVELOPE_SCHEMA))
        return found

    def lived_with(self) -> Callable[[Target], bool]:
        """Which topics a run would start with although a target cannot have all their columns."""
        with contextlib.suppress(ConnectorError):
            codecs = Codecs(self.pipeline.schemas, self.pipeline.processing.state_dir)
            newest = State(self.pipeline.processing.state_dir, self.pipeline.name).peek().newest
            if newest is not None and newest.versions:
                return lives_with(self.pipeline, newest.versions, codecs.versions_unregistered())
        return lambda target: False

    def _inferred(self) -> dict[Topic, pa.Schema]:
        """The columns that the messages of earlier runs had, where the format finds them."""
        with contextlib.suppress(ConnectorError):
            newest = State(self.pipeline.processing.state_dir, self.pipeline.name).peek().newest
            return {topic: unpack_schema(text) for topic, text in newest.columns.items()} if newest else {}
        return {}

    def show_columns(self, streams: Mapping[str, Schemas], console: Console) -> None:
        """Print the columns of each topic as a table."""
        for topic, about in self.columns(streams).items():
            console.print(Text.assemble((topic, "cyan")))
            if about["columns"] is None:
                console.print(Text("  known with the first messages: their format finds the columns", style="dim"))
                continue
            sinks = about["sinks"]
            rows = [
                (printable(name), types["type"], *(_there(types[sink]) for sink in sinks))
                for name, types in about["columns"].items()
            ]
            listing(console, ("column", "type", *(f"in {sink}" for sink in sinks)), rows)


def _types(column: str, there: Mapping[str, pa.Schema | None]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for sink, schema in there.items():
        at = -1 if schema is None else schema.get_field_index(column)
        found[sink] = str(schema.field(at).type) if schema is not None and at >= 0 else None
    return found


def _there(kind: str | None) -> Text:
    return Text("new", style="dim") if kind is None else Text(kind)


def _cell(value: Any) -> Text:
    text = printable(value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value))
    return Text("" if value is None else text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…")
