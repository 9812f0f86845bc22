"""What a person sees of a pipeline: the live view, the status and the closing line, all made from one status."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.runtime.messages import letters
from penstock.runtime.telemetry import ENDED, Telemetry, failed_tables

Status = Mapping[str, Any]
Cell = str | Text | tuple[str, str]
Cells = tuple[Cell, Cell, Cell, Cell, Cell]

_COLOURS = {
    "starting": "cyan",
    "running": "green",
    "healthy": "green",
    "degraded": "yellow",
    "unhealthy": "red",
    "failed": "red",
    "dead": "red",
    "stopped": "blue",
}
_DOING = {
    "plan": "planning",
    "stage": "staging",
    "prepare": "writing the manifest",
    "commit": "committing",
    "finish": "writing the manifest",
    "ack": "acknowledging",
}
_BARS = "▁▂▃▄▅▆▇█"
_WHEEL = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_TOPICS = 8
_ERRORS = 3
_BAD = 3
_NAMED = 3
_COPIES = 5
"""Tables being copied that are shown."""
_BAR = 8
"""Characters of a progress bar."""
_NAME = 14
"""Characters of a name that are shown at least, beside the last column."""
_PROBLEMS = 5
_PROBLEM_LINES = 3
"""Lines of the terminal that one problem may take."""


class LiveView:
    """Renders the telemetry as it is whenever the terminal is refreshed."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self.stopping = False
        self.restore_terminal: Callable[[], None] = lambda: None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status = self._telemetry.status()
        wheel = "" if status["state"] in ENDED else _WHEEL[int(time.monotonic() * 8) % len(_WHEEL)]
        doing = f"{wheel} finishing the epoch in hand; once more to abort" if wheel and self.stopping else wheel
        yield panel(status, options.max_width, doing)


def panel(status: Status, width: int, doing: str = "") -> RenderableType:
    """The whole of a status, in as much detail as `width` has room for."""
    colour = _COLOURS.get(status["state"], "white")
    title = Text.assemble((f"{status['pipeline']} ", "bold"), (f"● {status['state']}", colour))
    parts: list[RenderableType] = [_now(status, doing), *_waits(status)]
    parts += [Text(line, style=colour) for line in _problems(status, width)]
    parts += [Text(), _numbers(status, width)]
    if status["bad"]:
        parts += [Text(), *(_bad(each, width) for each in status["bad"][-_BAD:])]
    errors = status["errors"][: -1 if status["state"] == "failed" else None]  # the last one is then the reason
    errors = errors[-_ERRORS:]
    if errors:
        parts += [Text(), *(_error(error, width) for error in errors)]
    parts += _where(status, width)
    engine = f"{status['engine']} · " if status["engine"] and status["state"] != "starting" else ""
    foot = f"{engine}{duration(status['uptime_secs'])}"
    return Panel(
        Group(*parts), title=title, title_align="left", subtitle=foot, subtitle_align="right", border_style="dim"
    )


def closing(status: Status) -> Text:
    """One line that says how it went."""
    colour = _COLOURS.get(status["state"], "white")
    parts = [
        _count(status["epochs"], "epoch"),
        f"{status['rows']['in']:,} rows in",
        f"{status['rows']['out']:,} rows out",
        f"{_count(dead, 'dead letter')} among them (penstock dlq show)" if (dead := _dead_letters(status)) else "",
        f"{status['skipped']:,} skipped" if status["skipped"] else "",
        f"{status['discarded']:,} discarded" if status.get("discarded") else "",
        _count(retries, "retry", "retries") if (retries := sum(status["retries"].values())) else "",
        duration(status["uptime_secs"]),
    ]
    failed = failed_tables(status)
    if failed:
        more = ", …" if len(failed) > _NAMED else ""
        parts.append(f"{_count(len(failed), 'table')} failed: {', '.join(list(failed)[:_NAMED])}{more}")
    return Text.assemble((status["state"], f"bold {colour}"), *(f" · {part}" for part in parts if part))


def _dead_letters(status: Status) -> int:
    """How many of the rows out are dead letters."""
    found = (sink["topics"].get(letters.TOPIC, {}).get("rows", 0) for sink in status["sinks"].values())
    return sum(found)


def duration(seconds: float) -> str:
    """`0:01:12`; days in front when there are any."""
    minutes, secs = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02d}:{secs:02d}"


def size(count: float) -> str:
    """Bytes as people say them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def sparkline(values: list[int], width: int) -> str:
    """The newest `width` values as bars; the highest is full."""
    shown = values[-width:]
    top = max(shown, default=0)
    if not top:
        return ""
    while shown and not shown[0]:
        shown = shown[1:]
    return "".join(_BARS[min(7, value * 8 // (top + 1))] for value in shown)


def _now(status: Status, doing: str) -> Text:
    epoch, last = status["epoch"], status["last_epoch"]
    if epoch:
        phase = _DOING.get(epoch["phase"], epoch["phase"])
        line = Text.assemble(("epoch ", "dim"), (f"{epoch['number']}", "bold"), f" {phase} {epoch['secs']:.1f} s")
    elif status["state"] == "starting":
        line = Text("starting; waits for" if status.get("waits") else status["engine"] or "starting")
    elif last:
        line = Text.assemble(("epoch ", "dim"), (f"{last['number']}", "bold"), " committed")
    elif status["state"] in ENDED:
        line = Text("no epoch was committed in this run")
    else:
        line = Text(_first_rows(status))
    if last:
        spent = sum(last["seconds"].values())
        slow = sorted(last["seconds"].items(), key=lambda item: -item[1])[:2]
        detail = ", ".join(f"{name} {secs:.2f}" for name, secs in slow)
        line.append(f"  · the last took {spent:.2f} s ({detail})", style="dim")
    if doing:
        line = Text.assemble((f"{doing}  ", "cyan"), line)
    line.no_wrap = True
    line.overflow = "ellipsis"
    return line


def _waits(status: Status) -> list[Text]:
    """What a start waits for, a line each."""
    waits = status.get("waits", ()) if status["state"] not in ENDED else ()
    return [Text.assemble("  ", each["for"], (f"  {each['secs']:.0f} s", "dim")) for each in waits]


def _first_rows(status: Status) -> str:
    """What a pipeline without an epoch waits for."""
    tables = sum(len(source["tables"].get("copying", ())) for source in status["sources"].values())
    return f"waiting for the first copy of {_count(tables, 'table')}" if tables else "waiting for rows"


def _numbers(status: Status, width: int) -> Table:
    """The counters, in columns. Where there is little room, names are cut and never numbers."""
    columns = 5 if width >= 72 else 4 if width >= 44 else 3
    gap = 2 if width >= 44 else 1
    rows = [[Text.assemble(cell) for cell in row[:columns]] for row in _counted(status, width)]
    widths = [max(row[place].cell_len for row in rows) for place in range(columns)]
    room = width - 4 - gap * (columns - 1) - sum(widths) + widths[1] + (widths[4] if columns > 4 else 0)
    last = min(widths[4], room - min(widths[1], _NAME)) if columns > 4 else 0
    widths[1] = min(widths[1], max(4, room - last))
    grid = Table.grid(padding=(0, gap), expand=False)
    for place, most in enumerate([*widths[:4], last][:columns]):
        right = place in (2, 3)
        grid.add_column(
            style="" if place else "dim",
            justify="right" if right else "left",
            width=most,
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in rows:
        grid.add_row(*row)
    return grid


def _counted(status: Status, width: int) -> Iterator[Cells]:
    """What is counted of the run, its sources, copies and sinks: label, name, rows, a rate or size, and more."""
    rows = status["rows"]
    bars = (sparkline(rows["history"], min(30, max(6, width - 64))), "green")
    rates = [f"{rows['in_per_sec']:,.0f}/s", f"{rows['out_per_sec']:,.0f}/s"]
    if status["state"] in ENDED:
        bars = ("on average, while it had work" if status["working_secs"] else "", "dim")
        rates = [_average(rows["in"], status["working_secs"]), _average(rows["out"], status["working_secs"])]
    yield "in", "", f"{rows['in']:,}", rates[0], bars
    yield "out", "", f"{rows['out']:,}", rates[1], size(status["bytes"]["out"])
    if status.get("latency_secs") is not None:
        yield "visible", "", f"{status['latency_secs']:.2f} s", "", ("after its commit", "dim")
    codes = ", ".join(f"{code} {count:,}" for code, count in status.get("dead_letters_by_code", {}).items())
    for name, about in (("skipped", ""), ("dead_letters", codes), ("discarded", "")):
        if status.get(name):
            yield name.replace("_", " "), "", (f"{status[name]:,}", "yellow"), "", (about, "dim")
    yield "", "", "", "", ""
    for name, source in status["sources"].items():
        lag = "" if source["lag"] is None else f"lag {_lag(source)}"
        yield "source", name, f"{source['rows']:,}", lag, _health(source)
        for table, copy in list(source["tables"].get("copying", {}).items())[:_COPIES]:
            yield "copying", table, f"{copy['rows']:,}", *_copied(copy)
    for name, sink in status["sinks"].items():
        yield from _written(name, sink)


def _written(name: str, sink: Status) -> Iterator[Cells]:
    """A line for each topic of a sink, those with the most rows first."""
    topics = sorted(sink["topics"].items(), key=lambda item: -item[1]["rows"])
    if not topics:
        yield "sink", name, "0", "", _health(sink)
    for number, (topic, written) in enumerate(topics[:_TOPICS]):
        ill = sink["state"] in ("degraded", "unhealthy")
        rate = f"{written['rows_per_sec']:,.0f}/s · " if written.get("rows_per_sec") else ""
        more: Cell = _health(sink) if number == 0 and ill else (f"{rate}epoch {written['last_epoch']}", "dim")
        yield "sink", Text.assemble(name, (f" {topic}", "cyan")), f"{written['rows']:,}", size(written["bytes"]), more
    rest = topics[_TOPICS:]
    if rest:
        total = sum(written["rows"] for _, written in rest)
        yield "", f"and {_count(len(rest), 'more topic')}", f"{total:,}", "", ""


def _average(rows: int, secs: float) -> str:
    return f"{rows / secs:,.0f}/s" if secs else ""


def _lag(source: Status) -> str:
    return size(source["lag"]) if source.get("lag_unit") == "bytes" else _count(source["lag"], "row")


def _copied(copy: Status) -> tuple[Text, Text]:
    """How much of a copy is there, as a bar, and when it will end."""
    if not copy["estimate"]:
        return Text(f"{copy['rows_per_sec']:,.0f}/s"), Text("")
    share = min(1.0, copy["rows"] / copy["estimate"])
    full = round(share * _BAR)
    left = f"{duration(copy['eta_secs'])} left" if copy["eta_secs"] is not None else ""
    bar = Text.assemble(("█" * full, "cyan"), ("░" * (_BAR - full), "dim"), f" {left}")
    return Text(f"{share:.0%}"), bar


def _problems(status: Status, width: int) -> list[str]:
    """What is wrong, each problem cut to a few lines; a hint has a line of its own."""
    problems = status["problems"]
    most = _PROBLEM_LINES * max(20, width - 4)
    lines = [line for problem in problems[:_PROBLEMS] for line in problem.splitlines() if line.strip()]
    lines = [line if len(line) <= most else f"{line[: most - 1]}…" for line in lines]
    return [*lines, f"and {len(problems) - _PROBLEMS} more"] if len(problems) > _PROBLEMS else lines


def _health(part: Status) -> Text:
    """The state alone: the reason is shown above, where there is room for it."""
    colour = _COLOURS.get(part["state"], "dim")
    retries = f", {_count(part['retries'], 'retry', 'retries')}" if part["retries"] else ""
    return Text("" if part["state"] == "unknown" and not retries else f"{part['state']}{retries}", style=colour)


def _where(status: Status, width: int) -> list[RenderableType]:
    """The console, and every port on which the run listens."""
    if status["state"] in ENDED:
        return []
    ports = [f"{port['address']}:{port['port']} {port['program']}" for port in status["ports"]]
    lines = [f"console {status['url']}"] if status["url"] else []
    lines += [f"listens on {', '.join(ports)}"] if ports else []
    return [Text(), *(Text(line, style="dim") for line in lines)] if lines else []


def _bad(bad: Status, width: int) -> Text:
    line = Text.assemble(
        (f"epoch {bad['epoch']} ", "dim"), (f"{bad['code']} ", "yellow"), " ".join(bad["reason"].split())
    )
    line.truncate(_PROBLEM_LINES * max(20, width - 4), overflow="ellipsis")
    line.overflow = "fold"
    return line


def _error(error: Status, width: int) -> Text:
    at = datetime.fromisoformat(error["at"]).astimezone()
    line = Text.assemble((f"{at:%H:%M:%S} ", "dim"), (f"{error['component']} ", ""), (f"{error['code']} ", "yellow"))
    line.append(error["text"].partition("\n")[0])
    line.truncate(max(20, width - 4), overflow="ellipsis")
    return line


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
