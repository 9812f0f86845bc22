"""What `penstock check` shows when asked: the columns of each topic beside those of its targets, and a few rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.text import Text

from penstock.changes import own_columns
from penstock.cli.terminal import listing, show_rows
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
_UNKEPT = "not kept"


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
                count = "1 row" if batch.num_rows == 1 else f"{batch.num_rows} rows"
                head = Text.assemble((f"{name}:{printable(stream)} → ", "dim"), (target.topic, "cyan"))
                console.print(
                    head.append(f"  {count}{how}", style="dim"),
                    soft_wrap=True,
                )
                names = batch.schema.names
                show_rows(names, [[_cell(row[column]) for column in names] for row in batch.to_pylist()], console)
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
            applied = {
                sink for sink in target.sinks if getattr(self.pipeline.sinks[sink].config, "mode", "") == "upsert"
            }
            found[target.topic] = {
                "sinks": list(target.sinks),
                "columns": None if schema is None else _beside(schema, there, applied),
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
            newest = State.of(self.pipeline).peek().newest
            if newest is not None and newest.versions:
                return lives_with(self.pipeline, newest.versions, codecs.versions_unregistered())
        return lambda target: False

    def _inferred(self) -> dict[Topic, pa.Schema]:
        """The columns that the messages of earlier runs had, where the format finds them."""
        with contextlib.suppress(ConnectorError):
            newest = State.of(self.pipeline).peek().newest
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


def _beside(schema: pa.Schema, there: Mapping[str, pa.Schema | None], applied: Collection[str]) -> dict[str, Json]:
    """Each column with its type here and in the targets; `applied`: sinks that apply changes, and keep no words about them."""
    own = own_columns(schema)
    found: dict[str, Json] = {}
    for column in schema:
        if pa.types.is_null(column.type):
            continue  # it has no values, and no target gets it
        found[column.name] = {"type": str(column.type)}
        for sink, known in there.items():
            at = -1 if known is None else known.get_field_index(column.name)
            kind = str(known.field(at).type) if known is not None and at >= 0 else None
            found[column.name][sink] = _UNKEPT if kind is None and sink in applied and column.name not in own else kind
    return found


def _there(kind: str | None) -> Text:
    return Text(kind or "new", style="dim" if kind in (None, _UNKEPT) else "")


def _cell(value: Any) -> Text:
    text = printable(value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value))
    return Text("" if value is None else text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…")
