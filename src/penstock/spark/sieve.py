"""Find the rows that make a query fail, by running it over halves of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from penstock.errors import DataError
from penstock.formats import Failures
from penstock.pipeline.routing import Route
from penstock.runtime.job import Job
from penstock.runtime.messages import letters
from penstock.runtime.reading import Rows, show

CODE = "PEN-3003"
"""Of a row that SQL fails on."""

TRIES = 300
"""Queries that are run to find the rows at fault: about 20 rows of a million, or 40 of a thousand."""


@dataclass
class Sieve:
    """Which rows of each task's input a query gets, by their number in it."""

    only: tuple[int, int, int] | None = None
    """Task, first row and the row after the last; None: all rows of all tasks."""
    without: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    """Per task the rows that are left out, each with the reason: they become dead letters."""

    @property
    def probes(self) -> bool:
        return self.only is not None

    def part(self, task: int, first: int, rows: Rows) -> tuple[Rows, dict[int, str]]:
        """Of the rows that begin with this number: the ones that the query gets, and the others by their place among them."""
        places = np.arange(first, first + rows.batch.num_rows)
        if self.only is not None:
            chosen, low, high = self.only
            return rows.only((places >= low) & (places < high) & (task == chosen)), {}
        left = {number - first: why for number, why in self.without.get(task, {}).items() if number in places}
        return (rows.only(~np.isin(places - first, list(left))) if left else rows), left


def letters_of(rows: Rows, left: Mapping[int, str], job: Job) -> Rows:
    """Dead letters for the rows that a query fails on."""
    assert job.letters is not None
    topic, tally = rows.target.topic, rows.tally
    tally.kept(topic, CODE, len(left))
    for why in left.values():
        show(tally, topic, CODE, "sql", why)
    (place,) = rows.places(job)
    if rows.envelopes is not None:
        failures = Failures.of({at: ("sql", why) for at, why in left.items()})
        made = letters.of_messages(rows.envelopes, failures, place, job.epoch, CODE)
    else:
        each = [
            letters.of_rows(rows.batch.slice(at, 1), CODE, "sql", why, place, job.epoch, "input")
            for at, why in sorted(left.items())
        ]
        made = pa.Table.from_batches(each).combine_chunks().to_batches()[0]
    return Rows(letters.target(job.letters), made, tally, part=rows.part)


def find(
    counts: Sequence[int], fails: Callable[[int, int, int], DataError | None], error: DataError
) -> dict[int, dict[int, str]]:
    """
    Per task the rows that the query fails on, with the reason; raises `error` if they are too many to find.

    A query that fails is dear. So the half beside one that holds no such row is not asked: it must hold them.
    """
    tries = 0

    def failing(task: int, low: int, high: int) -> DataError | None:
        nonlocal tries
        tries += 1
        if tries > TRIES:
            raise error
        return fails(task, low, high)

    found: dict[int, dict[int, str]] = {}
    is_only = np.count_nonzero(counts) == 1
    for task, count in enumerate(counts):
        waiting = [(0, count, is_only, False)] if count else []
        while waiting:
            low, high, is_known, is_left = waiting.pop()
            if high - low > 1 and is_known:
                why = error
            elif (answer := failing(task, low, high)) is not None:
                why = answer
            else:
                if is_left:
                    waiting.append((*waiting.pop()[:2], True, False))
                continue
            if high - low == 1:
                found.setdefault(task, {})[low] = why.message
                continue
            middle = (low + high) // 2
            waiting += [(middle, high, False, False), (low, middle, False, True)]
    return found


def keeps_rows(job: Job, sources: Collection[str], route: Route) -> bool:
    """True if rows of these sources may become dead letters."""
    return job.letters is not None and all(job.on_error.of(each, route) == "dead_letter" for each in sources)
