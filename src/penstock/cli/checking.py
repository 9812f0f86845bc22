"""`penstock check`: opens every connector, asks it what is wrong, and shows where rows would go."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock.cli.looking import Looks, targets
from penstock.cli.schemas import checked, entries_of
from penstock.cli.terminal import json_text, listing
from penstock.durable import Json
from penstock.errors import ConfigError, ConnectorError, from_text, is_of_stream, printable
from penstock.pipeline import Pipeline
from penstock.pipeline.checks import stream_notices
from penstock.remedies import REMEDIES
from penstock.runtime import readiness
from penstock.runtime.job import is_plain
from penstock.runtime.messages.codecs import Codecs
from penstock.runtime.messages.foreseen import LETTERS, message_targets, misfits
from penstock.schema import discover, is_envelope, key_of
from penstock.sink import SinkConnector
from penstock.source import Connector, Finding, ProducerConfig, Schemas, SourceConnector, SourceContext, StreamingSource
from penstock.spark.java import find_java, java_problem
from penstock.spark.master import check_master
from penstock.spark.rehearsal import on_cluster
from penstock.spark.versions import check_spark, spark_version
from penstock.web.server import Access


def _console(pipeline: Pipeline) -> str:
    """The console may be served at its address, and its token can be read."""
    processing = pipeline.processing
    if processing.metrics_port is not None:
        Access.of(processing.metrics_host, processing.console_token)
    return ""


_LOOKS: tuple[readiness.Look, ...] = (*readiness.LOOKS, _console)


def require(pipeline: Pipeline, master: str | None) -> None:
    """Refuse to start a run for what `check` finds on this machine."""
    for look in _LOOKS:
        look(pipeline)
    check_master(master)
    spark_version()
    problem = java_problem()
    if problem:
        raise problem


def check(
    pipeline: Pipeline,
    console: Console,
    master: str | None = None,
    *,
    json: bool = False,
    show_schema: bool = False,
    sample: int = 0,
) -> bool:
    """
    Print all findings and the planned routes; True when nothing has to be fixed.

    `show_schema`: also the columns of each topic beside those of its targets. `sample`: also so many rows of each stream.
    """
    if json:
        console = Console(file=io.StringIO())
    report = _Report(console)
    console.print(Text.assemble((printable(pipeline.name), "bold"), f" · {pipeline.delivery}"), soft_wrap=True)
    for notice in pipeline.notices:
        report.notice(notice)
    for finding in _machine(pipeline, master):
        report.add(finding)
    streams: dict[str, Schemas] = {}
    looks = Looks(pipeline, sample)
    with tempfile.TemporaryDirectory(prefix="penstock-check-") as scratch:
        for kind, connectors in (("source", pipeline.sources), ("sink", pipeline.sinks)):
            for name, connector in connectors.items():
                context = _context(pipeline, name, Path(scratch)) if kind == "source" else None
                findings = list(_examine(name, connector, context, streams, looks))
                report.connector(kind, name, connector, findings)
        report.part = "cluster"
        for finding in on_cluster(pipeline, master, Path(scratch, "spark.log")):
            report.add(finding)
    _schemas(pipeline, report)
    _routes(pipeline, streams, console)
    for notice in stream_notices(pipeline, streams):
        report.notice(notice)
    report.part = "routes"
    for problem in pipeline.check_streams(streams):
        report.add(Finding(False, f"{problem.code} {problem.what}", problem.hint))
    if any(route.sql or route.transform for route in pipeline.router.routes):
        console.print(Text("  SQL and transforms are analysed by Spark when the run starts", style="dim"))
    if show_schema:
        looks.show_columns(streams, console)
    if sample:
        looks.show_rows(console)
    if json:
        columns = {
            s: {n: {c.name: str(c.type) for c in schema} for n, schema in each.items()} for s, each in streams.items()
        }
        found = {"pipeline": pipeline.name, "ok": not report.faults, "findings": report.found, "streams": columns}
        found |= {"topics": looks.columns(streams)} if show_schema else {}
        found |= {"sample": looks.rows()} if sample else {}
        print(json_text(found, indent=1))
    report.close()
    return not report.faults


@dataclass
class _Report:
    """Prints findings, each with a mark, and counts what has to be fixed."""

    console: Console
    faults: int = field(default=0)
    found: list[Json] = field(default_factory=list)
    part: str = "machine"

    def notice(self, text: str) -> None:
        self.found.append({"part": "notice", "ok": True, "what": text, "fix": ""})
        self.console.print(Text(f"! {printable(text)}", style="yellow"), soft_wrap=True)

    def add(self, finding: Finding, indent: str = "") -> None:
        self.faults += not finding.ok
        fix = finding.fix if finding.ok else finding.fix or _meaning(finding.what)
        self.found.append({"part": self.part, "ok": finding.ok, "what": finding.what, "fix": fix})
        mark = (f"{indent}✓ ", "green") if finding.ok else (f"{indent}✗ ", "bold red")
        line = Text.assemble(mark, (printable(finding.what), "" if finding.ok else "red"))
        self.console.print(line, soft_wrap=True)
        if finding.fix:
            self.console.print(Text(f"{indent}  → {printable(finding.fix)}"), soft_wrap=True)

    def close(self) -> None:
        """The last word: what has to be fixed, as a table."""
        if not self.faults:
            self.console.print(Text("ready to run", style="bold green"))
            return
        rows = [[printable(each[name]) for name in ("part", "what", "fix")] for each in self.found if not each["ok"]]
        self.console.print(Text(f"{self.faults} to fix", style="bold red"))
        listing(self.console, ("where", "what is wrong", "what to do"), rows)

    def connector(self, kind: str, name: str, connector: Connector[Any] | None, findings: Sequence[Finding]) -> None:
        self.part = f"{kind} {name}"
        mark = ("✓ ", "green") if all(finding.ok for finding in findings) else ("✗ ", "bold red")
        system = name if connector is None else getattr(type(connector), "name", type(connector).__name__)
        beside = (f" ({system})" if system != name else "", "dim")
        self.console.print(Text.assemble(mark, (f"{kind} ", "dim"), name, beside))
        for finding in findings:
            self.add(finding, "    ")


def _machine(pipeline: Pipeline, master: str | None) -> Iterator[Finding]:
    """What a run needs besides its connectors: the list of `require`."""
    looks: list[Callable[[], str]] = [
        *(partial(look, pipeline) for look in _LOOKS),
        partial(check_master, master),
        check_spark,
        _java,
    ]
    refused: list[Finding] = []
    for look in looks:
        try:
            said = look()
        except ConnectorError as error:
            if (found := _refusal(error)) not in refused:  # two looks may fail for one reason
                refused.append(found)
                yield found
        else:
            if said:
                yield Finding(True, said)


def _java() -> str:
    problem = java_problem()
    if problem:
        raise problem
    java = find_java()
    return f"Java {java.version}" if java else ""


def _context(pipeline: Pipeline, name: str, scratch: Path) -> SourceContext:
    """What a run would give the source, with a copy of its state: to check is not to change anything."""
    kept = pipeline.processing.state_dir / "sources" / name
    if kept.is_dir():
        shutil.copytree(kept, scratch / name)
    routes = [route for route in pipeline.router.effective if route.source in (None, name)]
    produces = tuple(ProducerConfig(route.to, route.partitions, route.reliable_dispatch) for route in routes)
    return SourceContext(scratch / name, produces)


def _examine(
    name: str,
    connector: SourceConnector[Any] | SinkConnector[Any, Any],
    context: SourceContext | None,
    streams: dict[str, Schemas],
    looks: Looks,
) -> Iterator[Finding]:
    if isinstance(connector, StreamingSource) and readiness.runs(looks.pipeline):
        what = "not opened beside the pipeline that runs: it has the port or the session"
        yield Finding(True, what, "to check it, stop the pipeline")
        return
    try:
        try:
            if isinstance(connector, SourceConnector) and context is not None:
                connector.open(context)
            else:
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
            yield from looks.take(name, connector)
        if isinstance(connector, SinkConnector):
            yield from _places(name, connector, streams, looks)
    except ConnectorError as error:
        yield _refusal(error)
    finally:
        connector.close()


def _refusal(error: ConnectorError) -> Finding:
    """An error as a finding. A hint that sends the reader to `penstock check` is left out: this is what it says."""
    return Finding(False, f"{error.code} {error.message}", "" if "penstock check" in error.hint else error.hint)


def _all_that_is_wrong(connector: Connector[Any]) -> Sequence[Finding]:
    """What a connector finds although it refused to open, so that nobody has to fix one thing after the other."""
    try:
        return connector.check()
    except Exception:  # noqa: BLE001 - it was never opened, so that it may lack anything: the refusal says what is wrong
        return ()


def _meaning(what: str) -> str:
    """What to do about a finding that does not say so itself."""
    error = from_text(what)
    return REMEDIES[error.code] if error is not None else "see docs/troubleshooting.md"


def _places(name: str, sink: SinkConnector[Any, Any], streams: dict[str, Schemas], looks: Looks) -> Iterator[Finding]:
    """Topics that the sink has no place for."""
    found = [
        target
        for source, known in streams.items()
        for stream in known
        for target in targets(looks.pipeline, source, stream)
    ]
    found += message_targets(looks.decoders(), looks.pipeline.router, looks.pipeline.sources, streams)
    for topic in sorted({target.topic for target in found if name in target.sinks}):
        try:
            looks.targets[name, topic] = sink.schema(topic)
        except ConnectorError as error:
            if not is_of_stream(error):
                raise
            yield Finding(False, f"{topic} is left out: {error.code} {error.message}", error.hint)
    yield from _keyless(name, sink, streams, looks)
    pipeline, lived_with = looks.pipeline, looks.lived_with()
    for stops, misfit in misfits(
        looks.decoders(), pipeline.router, pipeline.sources, {name: sink}, streams, lived_with
    ):
        yield _refusal(misfit) if stops else Finding(True, f"{misfit.code} {misfit.message}", LETTERS)


def _keyless(name: str, sink: SinkConnector[Any, Any], streams: dict[str, Schemas], looks: Looks) -> Iterator[Finding]:
    """Topics whose rows a sink would apply by key, and that have none; what SQL makes of rows is known to Spark alone."""
    option = getattr(sink.config, "key", None)
    if not sink.capabilities.upsert or option is None:
        return
    for source, known in streams.items():
        for stream, schema in sorted(known.items()):
            key = list(option) or key_of(schema)
            if not schema.names or is_envelope(schema) or (key and set(key) <= set(schema.names)):
                continue
            for target in targets(looks.pipeline, source, stream):
                if name in target.sinks and is_plain(target.route):
                    what = f"{target.topic} has no key that every row has: {', '.join(key) or 'none is named'}"
                    yield Finding(False, f"PEN-4002 {what}", "set `key` in the sink to columns of the topic")


def _schemas(pipeline: Pipeline, report: _Report) -> None:
    """What is wrong with the schemas of the topics: by the registry, and as what messages are decoded with."""
    found = list(_versions(pipeline))
    if found:
        report.connector("registry", pipeline.schemas.registry.type, None, [finding for _, finding in found])
    report.part = "schemas"
    for finding in _unusable(pipeline, [subject for subject, finding in found if not finding.ok]):
        report.add(finding)


def _versions(pipeline: Pipeline) -> Iterator[tuple[str, Finding]]:
    """Whether a run could use the schemas of the topics, by subject; asks the registry, and registers nothing."""
    registry = pipeline.schemas.registry.make(pipeline.processing.state_dir)
    for entry in entries_of(pipeline.schemas):
        try:
            yield entry.subject, Finding(True, f"{entry.subject}: {checked(registry, entry)}")
        except ConnectorError as error:
            first, *rest = error.message.splitlines()  # a finding is one line
            what = " ".join([first, "; ".join(line.strip() for line in rest)]).rstrip()
            yield entry.subject, Finding(False, f"{entry.subject}: {error.code} {what}", error.hint)


def _unusable(pipeline: Pipeline, known: Sequence[str]) -> Iterator[Finding]:
    """Entries that no format can be made of; without those of the subjects `known`, which have a finding already."""
    with contextlib.suppress(ConnectorError):  # where the registry does not say, that is a finding of its own
        for each, error in Codecs(pipeline.schemas, pipeline.processing.state_dir).unusable():
            if each.subject not in known:
                what = f"[[schemas]] for {each.entry.topic}: {error.code} {error.message}"
                yield Finding(False, what, error.hint)


def _routes(pipeline: Pipeline, streams: dict[str, Schemas], console: Console) -> None:
    for source, schemas in streams.items():
        for stream, schema in sorted(schemas.items()):
            columns = ", ".join(f"{printable(column.name)} {column.type}" for column in schema)
            line = Text.assemble("  ", (f"{source}:", "dim"), printable(stream), (f" ({columns})", "dim"))
            console.print(line, soft_wrap=True)
            found = targets(pipeline, source, stream)
            if not found and pipeline.processing.unrouted == "skip":
                console.print(Text("    → nowhere: no route takes it, and its rows are skipped", style="yellow"))
            for target in found:
                how = " through SQL" if target.route.sql else f" through {target.route.transform}"
                how = how if target.route.sql or target.route.transform else ""
                line = Text.assemble("    → ", (target.topic, "cyan"), how, f" → {', '.join(target.sinks)}")
                console.print(line, soft_wrap=True)
