"""`penstock check`: opens every connector, asks it what is wrong, and shows where rows would go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock.errors import ConnectorError
from penstock.pipeline import Pipeline
from penstock.source import Connector, Finding, SourceConnector


def check(pipeline: Pipeline, console: Console) -> bool:
    """Print all findings and the planned routes; True when nothing has to be fixed."""
    console.print(
        Text.assemble((pipeline.name, "bold"), f" · {pipeline.delivery} · state in {pipeline.processing.state_dir}"),
        soft_wrap=True,
    )
    for notice in pipeline.notices:
        console.print(Text(f"! {notice}", style="yellow"), soft_wrap=True)
    streams: dict[str, list[str]] = {}
    faults = 0
    for kind, connectors in (("source", pipeline.sources), ("sink", pipeline.sinks)):
        for name, connector in connectors.items():
            findings = list(_examine(name, connector, streams))
            faults += sum(not finding.ok for finding in findings)
            _show(kind, name, connector, findings, console)
    _routes(pipeline, streams, console)
    for problem in pipeline.check_streams(streams):
        faults += 1
        console.print(Text(f"  {problem.code} {problem.what}", style="red"), soft_wrap=True)
        if problem.hint:
            console.print(Text(f"    → {problem.hint}"), soft_wrap=True)
    if faults:
        console.print(Text(f"{faults} to fix", style="bold red"))
    else:
        console.print(Text("ready to run", style="bold green"))
    return not faults


def _examine(name: str, connector: Connector[Any], streams: dict[str, list[str]]) -> Iterator[Finding]:
    try:
        connector.open()
        yield from connector.check()
        if isinstance(connector, SourceConnector):
            streams[name] = sorted(connector.schema())
    except ConnectorError as error:
        yield Finding(False, f"{error.code} {error.message}", error.hint)
    finally:
        connector.close()


def _show(kind: str, name: str, connector: Connector[Any], findings: list[Finding], console: Console) -> None:
    well = all(finding.ok for finding in findings)
    mark = ("✓ ", "green") if well else ("✗ ", "bold red")
    system = getattr(type(connector), "name", type(connector).__name__)
    console.print(Text.assemble(mark, (f"{kind} ", "dim"), name, (f" ({system})" if system != name else "", "dim")))
    for finding in findings:
        console.print(Text(f"    {finding.what}", style="" if finding.ok else "red"), soft_wrap=True)
        if finding.fix:
            console.print(Text(f"    → {finding.fix}"), soft_wrap=True)


def _routes(pipeline: Pipeline, streams: Mapping[str, list[str]], console: Console) -> None:
    for source, names in streams.items():
        for stream in names:
            for target in pipeline.router.targets(source, stream):
                how = " through SQL" if target.route.sql else f" through {target.route.transform}"
                console.print(
                    Text.assemble(
                        ("  ", ""),
                        (f"{source}:", "dim"),
                        f"{stream} → ",
                        (target.topic, "cyan"),
                        how if target.route.sql or target.route.transform else "",
                        f" → {', '.join(target.sinks)}",
                    ),
                    soft_wrap=True,
                )
