"""Running a pipeline for a person or a service: signals, the live view or log lines, the closing word."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.cli.terminal import Terminal, json_text, visible
from penstock.cli.view import LiveView, closing
from penstock.errors import without_secrets
from penstock.runtime.telemetry import Telemetry
from penstock.runtime.waker import PIECE_SECS

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

T = TypeVar("T")


def run(
    pipeline: Pipeline,
    *,
    drain: bool | threading.Event = False,
    stop: threading.Event | None = None,
    master: str | None = None,
    lost_state: Any = "stop",
    log_format: str = "auto",
    closing_line: bool = True,
) -> Telemetry:
    """Run until stopped, by a signal or the caller, or drained; the telemetry that is handed back has ended."""
    from penstock.runtime import supervisor
    from penstock.spark import engine_for
    from penstock.web import serve

    telemetry = Telemetry.of(pipeline)
    stop = stop or threading.Event()
    with shown(telemetry, pipeline.processing.log_level, log_format) as view, signals(stop, view):
        try:
            aside(
                lambda: supervisor.run(
                    pipeline,
                    engine_for(pipeline, master=master, alone=True),
                    drain=drain,
                    telemetry=telemetry,
                    stop=stop,
                    lost_state=lost_state,
                    serve=serve,
                )
            )
        except BaseException as error:
            telemetry.close(error)
            raise
        telemetry.close()
    if closing_line:
        Terminal(stderr=True).print(closing(telemetry.status()), soft_wrap=True)
    return telemetry


def aside(work: Callable[[], T]) -> T:
    """
    Run `work` in a thread of its own while this one waits, free to take signals.

    Spark replaces the handler of SIGINT when it starts in the main thread, and a signal would then cancel the epoch.
    """
    done = threading.Event()
    outcome: list[Any] = []

    def target() -> None:
        try:
            outcome.extend([work(), None])
        except BaseException as error:  # noqa: BLE001 (it is raised again, in the thread that waits)
            outcome.extend([None, error])
        finally:
            done.set()

    threading.Thread(target=target, name="penstock-pipeline", daemon=True).start()
    while not done.wait(PIECE_SECS):
        pass  # in pieces, so that the handler of a signal that did not interrupt the wait still runs
    result, error = outcome
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


@contextlib.contextmanager
def signals(stop: threading.Event, view: LiveView | None) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks the pipeline to finish the epoch in hand; a second one ends the process at once."""

    stderr = os.dup(2)  # as in `shown`

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            if view is not None:
                os.write(stderr, b"\x1b[?25h\x1b[0m\n")  # the view has hidden the cursor
                view.restore_terminal()
            os.write(stderr, b"aborted; the next run goes on from the last committed epoch\n")
            os._exit(130)
        stop.set()
        if view is not None:
            view.stopping = True
        else:
            os.write(stderr, b"stopping: finishing the epoch in hand; once more to abort\n")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(stderr)


@contextlib.contextmanager
def shown(telemetry: Telemetry, log_level: str = "info", log_format: str = "auto") -> Iterator[LiveView | None]:
    """A live view when the terminal can show one, otherwise one log line per event on stderr."""
    # A descriptor of our own: while Spark starts, its JVM is given a log file for descriptor 2.
    with os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace") as stderr:
        console = Terminal(file=stderr)
        if log_format == "auto" and console.is_terminal and not console.is_dumb_terminal:
            with _live(telemetry, console, log_level) as view:
                yield view
        else:
            with logging_to(json_handler(stderr) if log_format == "json" else plain_handler(stderr), log_level):
                yield None


@contextlib.contextmanager
def _live(telemetry: Telemetry, console: Console, log_level: str) -> Iterator[LiveView]:
    view = LiveView(telemetry)
    live = Live(
        view,
        console=console,
        refresh_per_second=4,
        redirect_stdout=sys.stdout.isatty(),
        vertical_overflow="crop",
    )
    with logging_to(_AboveTheView(console), log_level), _no_control_echo(view, console), live:
        yield view


@contextlib.contextmanager
def _no_control_echo(view: LiveView, console: Console) -> Iterator[None]:
    """Keep the terminal from printing `^C` into the view, which would shift it by a line."""
    terminal = console.file.fileno()
    if not _in_foreground(terminal):  # touching the terminal from the background would stop the process
        yield
        return
    before = termios.tcgetattr(terminal)
    quiet = termios.tcgetattr(terminal)
    quiet[3] &= ~termios.ECHOCTL
    termios.tcsetattr(terminal, termios.TCSANOW, quiet)
    view.restore_terminal = lambda: termios.tcsetattr(terminal, termios.TCSANOW, before)
    try:
        yield
    finally:
        if _in_foreground(terminal):
            view.restore_terminal()


def _in_foreground(terminal: int) -> bool:
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # a terminal, but not the one that controls this process
        return False


@contextlib.contextmanager
def logging_to(handler: logging.Handler, level: str) -> Iterator[None]:
    """Send what Penstock logs to `handler`."""
    logger = logging.getLogger("penstock")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def plain_handler(stream: TextIO) -> logging.Handler:
    """One line per record: time, level, what happened."""
    handler = logging.StreamHandler(stream)
    formatter = _Plain("%(asctime)s.%(msecs)03dZ %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    return handler


def json_handler(stream: TextIO) -> logging.Handler:
    """One JSON object per record, for programs that collect logs."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_AsJson())
    return handler


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(without_secrets(super().format(record)))


class _AsJson(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = without_secrets(record.getMessage())
        line = {"at": at, "level": record.levelname.lower(), "logger": record.name, "message": said}
        found = dict(re.findall(r"(?:^|\s)(\w+)=(\S+)", said)) if record.name == "penstock" else {}
        return json_text({**line, **({"fields": found} if found else {})})


class _AboveTheView(logging.Handler):
    """Prints what a person should not miss above the live view, which shows the rest by itself."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "penstock.retry" or (record.levelno < logging.WARNING and record.name != "penstock.message"):
            return
        style = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}.get(record.levelname, "")
        at = time.strftime("%H:%M:%S ", time.localtime(record.created))
        self._console.print(Text.assemble((at, "dim"), (without_secrets(record.getMessage()), style)))
