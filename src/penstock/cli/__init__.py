"""The command line. Heavy imports stay inside the commands: help and errors come at once."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.text import Text

from penstock import __version__
from penstock.cli import offsets, tables
from penstock.cli.groups import File
from penstock.cli.terminal import Terminal, json_text
from penstock.errors import CODES, ConfigError, ConnectorError, FatalError
from penstock.remedies import REMEDIES

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline
    from penstock.schema.registry import Registry

app = typer.Typer(
    help="Connectors that feed Apache Spark, exactly once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(offsets.app, name="offsets")
app.add_typer(tables.app, name="tables")

DLQ = """
Show the records that could not be used, try them again, or let go of them, whether the pipeline runs or not.

\b
show    how many there are of each kind; --sample 3 prints the newest three
replay  after a fix: send them through the pipeline again, exactly once; one that fails again has one more attempt
drop    they are not shown and not replayed any more

--where is topic, code, rule, source, stream, sink or kind, and may be given more than once.
"""

SCHEMAS = """
Show, check and register the schemas of a pipeline's topics: penstock schemas list|show|check|register|infer FILE.
"""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one command and exit: 0 done, 1 failed, 2 a wrong setting, 130 aborted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    rest = [word for word in words if word not in ("--debug", "--verbose")]
    guarded(lambda: app(rest, prog_name="penstock"), debug=rest != words)


def guarded(work: Callable[[], object], *, debug: bool = False) -> NoReturn:
    """Do `work` and exit; an error is printed for a person, with a traceback only when debugging."""
    try:
        work()
    except ConnectorError as error:
        if debug:
            raise
        show(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:  # before or after a pipeline runs: while it does, it takes signals itself
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe had enough; nothing may be written any more, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        show(FatalError(_unexpected(error), code="PEN-5012", hint="run it again with --verbose to see where"))
        sys.exit(1)
    sys.exit(0)


def show(error: ConnectorError) -> None:
    """Print an error for a person: code, what happened, what the code means, what to do."""
    console = Terminal(stderr=True)
    first, _, rest = error.message.partition("\n")
    console.print(Text.assemble((error.code, "bold red"), f" {first}"), soft_wrap=True)
    if rest:
        console.print(Text(rest), soft_wrap=True)
    meaning = CODES[error.code]
    if not rest and not error.code.endswith("000") and meaning not in error.message:
        console.print(Text(f"  {meaning}", style="dim"), soft_wrap=True)
    hint = error.hint or ("" if rest else REMEDIES[error.code])
    if hint:
        console.print(Text.assemble(("  → ", "bold"), hint), soft_wrap=True)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--verbose", "--debug", help="Show where an error comes from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def run(
    file: File = None,
    drain: Annotated[
        bool,
        typer.Option("--drain", help="Stop once all that is there now is committed; exits with 1 if a table failed."),
    ] = False,
    master: Annotated[str | None, typer.Option(help="Spark master, e.g. local[4] or spark://host:7077.")] = None,
    lost_state: Annotated[
        str, typer.Option(help="When the target knows more than the state directory: stop, resume or start-over.")
    ] = "stop",
    log_format: Annotated[
        str, typer.Option(help="How events are logged: auto (a live view on a terminal), text, or json.")
    ] = "auto",
) -> None:
    """Run a pipeline until it is stopped."""
    from penstock.cli import running
    from penstock.cli.checking import require
    from penstock.runtime.telemetry import failed_tables

    if lost_state not in ("stop", "resume", "start-over"):
        raise ConfigError(f"--lost-state is {lost_state}", hint="it is stop, resume or start-over")
    if log_format not in ("auto", "text", "json"):
        raise ConfigError(f"--log-format is {log_format}", hint="it is auto, text or json")
    pipeline = load(file)
    require(pipeline, master)
    telemetry = running.run(pipeline, drain=drain, master=master, lost_state=lost_state, log_format=log_format)
    if drain and failed_tables(telemetry.status()):  # the closing line names them
        raise typer.Exit(1)


@app.command()
def check(
    file: File = None,
    master: Annotated[str | None, typer.Option(help="The Spark master that the run will have.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings and the streams as JSON.")] = False,
    show_schema: Annotated[
        bool, typer.Option("--show-schema", help="Print the columns of each topic beside those of its targets.")
    ] = False,
    sample: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=1000, help="Read, decode and route N rows of each stream; commits nothing."
        ),
    ] = 0,
) -> None:
    """Say what is wrong with a pipeline. Shows where its rows would go, too; changes nothing. Exits with 1 if so."""
    from penstock.cli.checking import check

    if not check(load(file), stdout(), master, json=json, show_schema=show_schema, sample=sample):
        raise typer.Exit(1)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("pipeline.toml"),
    source: Annotated[str | None, typer.Option(help="The source; asked for if left out.")] = None,
    sink: Annotated[str | None, typer.Option(help="The sink; asked for if left out.")] = None,
    name: Annotated[str | None, typer.Option(help="The pipeline's name; by default that of its directory.")] = None,
    given: Annotated[
        list[str] | None, typer.Option("--set", metavar="source.NAME=VALUE", help="An option, instead of being asked.")
    ] = None,
    from_danube: Annotated[
        Path | None, typer.Option(metavar="CONNECTOR.TOML", help="Rewrite this file of Danube Connect instead.")
    ] = None,
) -> None:
    """Write a pipeline file with a comment for each option; asks for what it needs."""
    from penstock.cli import initial

    if from_danube is not None:
        initial.write_from_danube(file, from_danube, stdout())
        return
    initial.write(file, source, sink, name, given or [], stdout())


@app.command()
def connectors(
    name: Annotated[
        str | None, typer.Argument(help="Show the options of this one.", autocompletion=lambda: _connector_names())
    ] = None,
) -> None:
    """List the connectors, or the options of one."""
    from penstock.cli import catalogue

    catalogue.show(name, stdout()) if name else catalogue.show_all(stdout())


@app.command()
def new(
    what: Annotated[str, typer.Argument(help="source or sink")],
    name: Annotated[str, typer.Argument(help="The system's name, in lower_snake.")],
    dir: Annotated[Path, typer.Option("--dir", help="Where to put the two files.")] = Path(),
    kind: Annotated[
        str, typer.Option(help="Of a source: range (can be read again), polling (is asked) or streaming (pushes).")
    ] = "range",
) -> None:
    """Write a connector to start from, with its test."""
    from penstock.cli import scaffold

    scaffold.write(what, kind, name, dir, stdout())


@app.command()
def status(
    file: File = None,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show what a pipeline does, or how it ended. Exits with 1 when it is not healthy."""
    from penstock.cli.view import panel
    from penstock.runtime.telemetry import ENDED, failed_tables, judge, read_status
    from penstock.web.server import url_of

    pipeline = load(file)
    processing = pipeline.processing
    found = read_status(processing.state_dir)
    if found is None and processing.metrics_port:  # with `checkpoint = false` there is no state directory to look into
        found = _fetch(url_of(processing.metrics_host, processing.metrics_port), pipeline)
    if found is None:
        raise FatalError(
            f"{pipeline.name} has left no status in {processing.state_dir}: it never ran",
            hint=f"penstock run {file or ''}".rstrip(),
        )
    if found["url"] and found["state"] not in ENDED:
        found = _fetch(found["url"], pipeline) or found
    verdict = judge(found)
    if json:
        print(json_text({**found, "ok": verdict.ok, "verdict": verdict.reason}, indent=1))
    else:
        console = stdout()
        console.print(panel(found, console.width))
        if not found["epochs"] and (earlier := _earlier(pipeline)):
            console.print(Text(earlier, style="dim"), soft_wrap=True)
        for notice in found["notices"]:
            console.print(Text(f"! {notice}", style="yellow"), soft_wrap=True)
        for name, why in failed_tables(found).items():
            console.print(Text(f"! {name} failed: {why['code']} {why['error']}", style="yellow"), soft_wrap=True)
    ended_badly = found["state"] in ENDED and failed_tables(found)
    if ended_badly or (not verdict.ok and found["state"] != "stopped"):
        raise typer.Exit(1)


@app.command()
def stop(
    file: File = None,
    drain: Annotated[bool, typer.Option("--drain", help="Only once all that is there now is committed.")] = False,
) -> None:
    """Ask a running pipeline to finish the epoch in hand and to end."""
    from penstock.runtime.commands import end_asked

    for line in end_asked(load(file), "drain" if drain else "stop", "command line"):
        print(line)


@app.command()
def console(
    directories: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR", help="Where state directories are; by default here.")
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port to listen on; 0 chooses a free one.")
    ] = 8600,
    host: Annotated[
        str, typer.Option(help="Address to listen on; another than this machine needs a token.")
    ] = "127.0.0.1",
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable that holds the token for actions.")
    ] = None,
) -> None:
    """Serve a page for all pipelines under some directories, running or not."""
    from penstock.cli import consoles

    consoles.serve(directories or [Path()], host, port, token_env)


@app.command()
def peek(
    target: Annotated[
        str, typer.Argument(help="A topic such as /orders, a directory or a file; with a pipeline file also s3://…")
    ],
    file: File = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, max=1000, help="How many rows.")] = 10,
    sink: Annotated[str, typer.Option(help="The sink to look into; by default the first that has the topic.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object per row.")] = False,
) -> None:
    """Print the first rows of a topic, wherever its sink keeps it, or of a local directory or file."""
    from penstock.cli import peeking

    if file is not None and target.endswith(".toml"):  # in either order
        target, file = re.sub(r"^(\w+):/(?!/)", r"\1://", str(file)), Path(target)  # of `://` a path keeps one slash
    if file is None and target.endswith(".toml"):
        raise ConfigError(f"{target} is a pipeline file", hint=f"name a topic as well: penstock peek /orders {target}")
    is_topic = file is not None or (target.startswith("/") and not Path(target).exists())
    peeking.peek(target, load(file) if is_topic else None, rows, json, stdout(), sink)


@app.command()
def logs(
    file: File = None,
    lines: Annotated[int, typer.Option("--lines", metavar="N", min=1, help="How many of the last lines.")] = 50,
) -> None:
    """Print the last errors of a pipeline and the end of Spark's log."""
    from penstock.cli import peeking

    peeking.logs(load(file), lines, stdout())


@app.command("dlq", help=DLQ)
def dead_letters(
    words: Annotated[list[str], typer.Argument(metavar="[FILE] show|replay|drop", show_default=False)],
    topic: Annotated[str | None, typer.Option(help="Only letters of this topic.")] = None,
    code: Annotated[str | None, typer.Option(help="Only letters with this error code.")] = None,
    where: Annotated[
        list[str] | None, typer.Option("--where", metavar="NAME=VALUE", help="Only letters with this value.")
    ] = None,
    sample: Annotated[int, typer.Option(metavar="N", min=0, help="Print the newest N letters as well (show).")] = 0,
    every: Annotated[bool, typer.Option("--all", help="Replayed and dropped letters, too (show).")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print them as JSON (show).")] = False,
) -> None:
    from penstock.cli import dlq
    from penstock.runtime.messages.replay import parse_where

    action, file = dlq.parse(words)
    named = [f"{name}={value}" for name, value in (("topic", topic), ("code", code)) if value is not None]
    chosen = parse_where([*named, *(where or ())])
    if action == "show":
        dlq.show(load(file), chosen, stdout(), sample=sample, json=json, every=every)
        return
    shows = [name for name, value in (("--sample", sample), ("--all", every), ("--json", json)) if value]
    if shows:
        raise ConfigError(
            f"dlq {action} does not take {shows[0]}: it would {action} all letters that are chosen",
            hint=f"choose them with --topic, --code or --where, such as --where rule=json.type; {shows[0]} is for `dlq show`",
        )
    dlq.command(load(file), "replay" if action == "replay" else "drop", chosen, stdout())


@app.command(
    "schemas",
    help=SCHEMAS,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def each_schema(context: typer.Context) -> None:
    from penstock.cli import schemas
    from penstock.runtime.commands import is_running
    from penstock.runtime.epochs import State

    def loaded(file: Path | None) -> tuple[Registry, list[schemas.SchemaFile]]:
        pipeline = load(file)
        if pipeline.processing.state_store is not None:  # the embedded registry is a part of the state
            state = State.of(pipeline)
            if "register" in context.args:
                state.open()
                stack.callback(state.close)
                stack.callback(state.record)
            else:
                state.peek()
        return pipeline.schemas.registry.make(pipeline.processing.state_dir), schemas.entries_of(pipeline.schemas)

    def runs(file: Path | None) -> bool:
        return is_running(load(file).processing.state_dir)

    with contextlib.ExitStack() as stack:
        schemas.make_app(loaded, stdout, runs)(context.args, prog_name="penstock schemas")


@app.command()
def pack(
    file: File = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The archive to write.")] = Path("environment.tar.gz"),
    more: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="PACKAGE", help="An installed package that your own modules need; may be repeated."
        ),
    ] = None,
) -> None:
    """Pack what executors need into one archive, which Spark takes to them: for a cluster without Penstock."""
    from penstock.spark.pack import pack

    packed = pack(output, load(file), more or [])
    console = stdout()
    console.print(f"{output}: {output.stat().st_size / 1e6:,.0f} MB with {', '.join(packed)}", soft_wrap=True)
    console.print(
        Text(
            f"PYSPARK_PYTHON=./environment/bin/python spark-submit --archives {output}#environment "
            f"{Path(__file__).parent.parent / '__main__.py'} run {file or 'pipeline.toml'}"
        ),
        soft_wrap=True,
    )


@app.command()
def doctor() -> None:
    """Check that this machine has what Penstock needs."""
    from penstock.cli import machine

    if not machine.show(stdout()):
        raise typer.Exit(1)


def load(file: Path | None) -> Pipeline:
    """The checked pipeline of a file, or of the one that the environment names."""
    from penstock.pipeline import Pipeline

    return Pipeline.from_toml(file)


def stdout() -> Terminal:
    """Where results go; wide when it is not a terminal, so that nothing is cut."""
    return Terminal() if sys.stdout.isatty() else Terminal(width=160)


def _earlier(pipeline: Pipeline) -> str:
    """What earlier runs left, for the status of a run that committed nothing."""
    from penstock.runtime.epochs import State

    newest = State.of(pipeline).peek().newest
    return f"earlier runs: epoch {newest.number} is {newest.state}" if newest is not None else ""


def _connector_names() -> list[str]:
    from penstock.pipeline import registry

    return sorted({entry.name for entry in registry.entries()})


def _fetch(url: str, pipeline: Pipeline) -> dict[str, Any] | None:
    """The status that a run serves, if it answers; on another address than loopback it wants the token of its console."""
    import json
    import urllib.request

    asked = urllib.request.Request(f"{url}/api/status")
    try:
        if (token := pipeline.processing.console_token) is not None:
            asked.add_header("Authorization", f"Bearer {token.reveal().encode().decode('latin-1')}")
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(asked, timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (OSError, ValueError, ConfigError):  # the token may be nowhere but with the run
        return None


def _unexpected(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
