"""What a run has done so far, and the log lines of an epoch."""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.durable import Json
from penstock.sink import Topic, WriteResult

if TYPE_CHECKING:
    from penstock.runtime.epochs import EpochReport

log = logging.getLogger("penstock")

UNKNOWN = "unknown"
"""The code of dead letters that an earlier run had staged: its manifest keeps their number."""


@dataclass
class Written:
    rows: int = 0
    discarded: int = 0
    bytes: int = 0
    last_epoch: int | None = None

    def add(self, result: WriteResult, epoch: int) -> None:
        self.rows += result.records_written
        self.bytes += result.bytes_written
        self.discarded += result.records_discarded
        self.last_epoch = epoch


@dataclass
class Totals:
    """What this run has done."""

    epochs: int = 0
    recovered: int = 0
    skipped: int = 0
    letters: Counter[str] = field(default_factory=Counter)
    """Dead letters by error code."""
    latency: float | None = None
    """Of the oldest row of the last epoch whose rows know when they came to be."""
    read: dict[str, int] = field(default_factory=dict)
    written: dict[tuple[str, Topic], Written] = field(default_factory=dict)
    retries: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    errors: deque[dict[str, Json]] = field(default_factory=lambda: deque(maxlen=10))
    bad: deque[dict[str, Json]] = field(default_factory=lambda: deque(maxlen=10))

    def add(self, report: EpochReport) -> None:
        self.epochs += 1
        self.recovered += report.recovered
        self.skipped += report.skipped
        self.letters.update(report.codes)
        if unknown := sum(report.letters.values()) - sum(report.codes.values()):
            self.letters[UNKNOWN] += unknown
        for source, rows in report.rows_in.items():
            self.read[source] = self.read.get(source, 0) + rows
        for pair, result in report.rows_out.items():
            self.written.setdefault(pair, Written()).add(result, report.number)
        for each in report.bad:
            named = {"source": each.source, "stream": each.stream, "topic": each.topic}
            self.bad.append({"epoch": report.number, **named, "code": each.code, "reason": each.reason})


def one_line(text: str) -> str:
    """A message and its hint in one line of a log."""
    return " ".join(text.split())


def log_epoch(report: EpochReport, rows_in: int, rows_out: int) -> None:
    written = sum(result.bytes_written for result in report.rows_out.values())
    log.info(
        "epoch=%d rows_in=%d rows_out=%d bytes_out=%d skipped=%d secs=%.3f %s%s",
        *(report.number, rows_in, rows_out, written, report.skipped, sum(report.seconds.values())),
        " ".join(f"{name}={value:.3f}" for name, value in report.seconds.items()),
        " recovered" if report.recovered else "",
    )
    if report.letters:
        log.warning("epoch=%d dead_letters=%d: `penstock dlq` shows them", report.number, sum(report.letters.values()))
    for each in report.bad:
        topic = f" topic={each.topic}" if each.topic else ""
        log.warning(
            "epoch=%d bad source=%s stream=%s%s %s: %s (%s)",
            *(report.number, each.source, each.stream, topic, each.code, one_line(each.reason), each.rule),
        )
    for (sink, name), result in report.rows_out.items():
        if result.records_discarded:
            log.warning(
                "epoch=%d discarded=%d sink=%s topic=%s: the target has no place for them (schema_evolution)",
                *(report.number, result.records_discarded, sink, name),
            )
