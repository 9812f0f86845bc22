"""`penstock check`: opens every connector, asks it what is wrong, and shows where rows would go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock.cli.schemas import checked, entries_of
from penstock.errors import ConfigError, ConnectorError, is_of_stream
from penstock.pipeline import Pipeline
from penstock.pipeline.routing import Target
from penstock.pipeline.shape import changes_between
from penstock.runtime.epochs import State
from penstock.schema import discover
from penstock.sink import SinkConnector
from penstock.source import Connector, Finding, Schemas, SourceConnector


def check(pipeline: Pipeline, console: Console) -> bool:
    """Print all findings and the planned routes; True when nothing has to be fixed."""
    console.print(
        Text.assemble((pipeline.name, "bold"), f" · {pipeline.delivery} · state in {pipeline.processing.state_dir}"),
        soft_wrap=True,
    )
    for notice in pipeline.notices:
        console.print(Text(f"! {notice}", style="yellow"), soft_wrap=True)
    streams: dict[str, Schemas] = {}
    faults = 0
    for kind, connectors in (("source", pipeline.sources), ("sink", pipeline.sinks)):
        for name, connector in connectors.items():
            findings = list(_examine(name, connector, streams, pipeline))
            faults += sum(not finding.ok for finding in findings)
            _show(kind, name, connector, findings, console)
    schemas = list(_schemas(pipeline))
    if schemas:
        faults += sum(not finding.ok for finding in schemas)
        _show("registry", pipeline.schemas.registry.type, None, schemas, console)
    _routes(pipeline, streams, console)
    for problem in pipeline.check_streams(streams):
        faults += 1
        console.print(Text(f"  {problem.code} {problem.what}", style="red"), soft_wrap=True)
        if problem.hint:
            console.print(Text(f"    → {problem.hint}"), soft_wrap=True)
    for finding in _since_the_last_run(pipeline):
        faults += not finding.ok
        console.print(Text(f"  {finding.what}", style="" if finding.ok else "red"), soft_wrap=True)
        if not finding.ok:
            console.print(Text(f"    → {finding.fix}"), soft_wrap=True)
    if any(route.sql or route.transform for route in pipeline.router.routes):
        console.print(Text("  SQL and transforms are analysed by Spark when the run starts", style="dim"))
    if faults:
        console.print(Text(f"{faults} to fix", style="bold red"))
    else:
        console.print(Text("ready to run", style="bold green"))
    return not faults


def _examine(
    name: str,
    connector: SourceConnector[Any] | SinkConnector[Any, Any],
    streams: dict[str, Schemas],
    pipeline: Pipeline,
) -> Iterator[Finding]:
    try:
        try:
            connector.open()
        except ConfigError as refused:
            found = _all_that_is_wrong(connector)
            yield from found
            if all(finding.ok for finding in found):
                raise refused
            return
        yield from connector.check()
        if isinstance(connector, SourceConnector):
            streams[name] = discover(connector)
        if isinstance(connector, SinkConnector):
            yield from _places(name, connector, streams, pipeline)
    except ConnectorError as error:
        yield Finding(False, f"{error.code} {error.message}", error.hint)
    finally:
        connector.close()


def _all_that_is_wrong(connector: Connector[Any]) -> Sequence[Finding]:
    """What a connector finds although it refused to open, so that nobody has to fix one thing after the other."""
    try:
        return connector.check()
    except ConnectorError:
        return ()  # it cannot look: then the refusal says what is wrong


def _places(
    name: str, sink: SinkConnector[Any, Any], streams: dict[str, Schemas], pipeline: Pipeline
) -> Iterator[Finding]:
    """Topics that the sink has no place for."""
    found = [
        target for source, known in streams.items() for stream in known for target in _targets(pipeline, source, stream)
    ]
    for topic in sorted({target.topic for target in found if name in target.sinks}):
        try:
            sink.schema(topic)
        except ConnectorError as error:
            if not is_of_stream(error):
                raise
            yield Finding(False, f"{topic} is left out: {error.code} {error.message}", error.hint)


def _targets(pipeline: Pipeline, source: str, stream: str) -> tuple[Target, ...]:
    try:
        return pipeline.router.targets(source, stream)
    except ConfigError:  # `check_streams` tells it
        return ()


def _since_the_last_run(pipeline: Pipeline) -> Iterator[Finding]:
    """What a run would say of the changes in the file, see docs/spec/changes.md."""
    directory = pipeline.processing.state_dir
    if not pipeline.processing.checkpoint or not directory.exists():
        return
    try:
        state = State(directory, pipeline.name).peek()
        if not state.fresh and state.identity.shape is not None:
            for each in changes_between(state.identity.shape, pipeline.shape()):
                yield Finding(each.ok, f"{'' if each.ok else 'PEN-1013 '}since the last run {each.what}", each.fix)
    except ConnectorError as error:
        yield Finding(False, f"{error.code} {error.message}", error.hint)


def _schemas(pipeline: Pipeline) -> Iterator[Finding]:
    """Whether a run could use the schemas of the topics; asks the registry, and registers nothing."""
    registry = pipeline.schemas.registry.make(pipeline.processing.state_dir)
    for entry in entries_of(pipeline.schemas):
        try:
            yield Finding(True, f"{entry.subject}: {checked(registry, entry)}")
        except ConnectorError as error:
            yield Finding(False, f"{entry.subject}: {error.code} {error.message}", error.hint)


def _show(kind: str, name: str, connector: Connector[Any] | None, findings: list[Finding], console: Console) -> None:
    well = all(finding.ok for finding in findings)
    mark = ("✓ ", "green") if well else ("✗ ", "bold red")
    system = name if connector is None else getattr(type(connector), "name", type(connector).__name__)
    console.print(Text.assemble(mark, (f"{kind} ", "dim"), name, (f" ({system})" if system != name else "", "dim")))
    for finding in findings:
        console.print(Text(f"    {finding.what}", style="" if finding.ok else "red"), soft_wrap=True)
        if finding.fix:
            console.print(Text(f"    → {finding.fix}"), soft_wrap=True)


def _routes(pipeline: Pipeline, streams: dict[str, Schemas], console: Console) -> None:
    for source, schemas in streams.items():
        for stream, schema in sorted(schemas.items()):
            columns = ", ".join(f"{column.name} {column.type}" for column in schema)
            console.print(
                Text.assemble(("  ", ""), (f"{source}:", "dim"), stream, (f" ({columns})", "dim")), soft_wrap=True
            )
            targets = _targets(pipeline, source, stream)
            if not targets and pipeline.processing.unrouted == "skip":
                console.print(Text("    → nowhere: no route takes it, and its rows are skipped", style="yellow"))
            for target in targets:
                how = " through SQL" if target.route.sql else f" through {target.route.transform}"
                console.print(
                    Text.assemble(
                        "    → ",
                        (target.topic, "cyan"),
                        how if target.route.sql or target.route.transform else "",
                        f" → {', '.join(target.sinks)}",
                    ),
                    soft_wrap=True,
                )
