"""What all tasks of a job came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.durable import Json
from penstock.runtime.job import Tally, TaskResult
from penstock.sink import Topic, WriteResult


@dataclass
class Staged:
    """The sum of the tasks' results, as a manifest keeps it."""

    receipts: dict[str, list[Json]] = field(default_factory=dict)
    notes: dict[str, list[Json]] = field(default_factory=dict)
    """In the order of the parts; of a part that several topics read, what each of them has to say."""
    rows_in: dict[str, int] = field(default_factory=dict)
    rows_out: dict[str, dict[Topic, tuple[int, int]]] = field(default_factory=dict)
    """What reached each sink and topic: rows and bytes; one that nothing reached has no epoch to check."""
    discarded: dict[str, dict[Topic, int]] = field(default_factory=dict)
    skipped: int = 0
    bad: int = 0
    """How many of those skipped were not good rows without a route."""
    retried: bool = False
    """A task was tried again: its first try may have left files."""

    @classmethod
    def of(cls, results: Sequence[TaskResult], skipped: Mapping[tuple[str, str], Json]) -> Staged:
        """`skipped`: streams that no task has read, with their notes."""
        staged = cls(retried=any(result.attempt for result in results))
        staged._count({number: tally for result in results for number, tally in result.tallies.items()})
        staged._note(results, skipped)
        total: dict[tuple[str, Topic], WriteResult] = {}
        for result in results:
            for name, receipt in result.receipts.items():
                staged.receipts.setdefault(name, []).append(receipt.model_dump(mode="json"))
            for pair, one in result.written.items():
                total[pair] = total.get(pair, WriteResult()) + one
        for (sink, topic), one in total.items():
            if one.records_written:
                staged.rows_out.setdefault(sink, {})[topic] = (one.records_written, one.bytes_written)
            if one.records_discarded:
                staged.discarded.setdefault(sink, {})[topic] = one.records_discarded
        return staged

    def _count(self, tallies: Mapping[int, Tally]) -> None:
        for tally in tallies.values():
            self.rows_in[tally.source] = self.rows_in.get(tally.source, 0) + tally.rows
            self.skipped += tally.skipped
            self.bad += tally.skipped - tally.unrouted

    def _note(self, results: Sequence[TaskResult], skipped: Mapping[tuple[str, str], Json]) -> None:
        parts: dict[int, tuple[str, list[Json]]] = {}
        for result in results:
            for number, tally in result.tallies.items():
                _, found = parts.setdefault(number, (tally.source, []))
                found += [note for note in tally.notes if note not in found]
        for (source, _), note in skipped.items():
            self.notes.setdefault(source, []).append(note)
        for _, (source, found) in sorted(parts.items()):
            self.notes.setdefault(source, []).extend(found)
        for result in results:
            for source, note in result.notes:
                if note not in self.notes.setdefault(source, []):
                    self.notes[source].append(note)
