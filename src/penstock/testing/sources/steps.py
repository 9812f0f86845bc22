"""What the laws of sources are made of: opening, joining and comparing rows."""

from __future__ import annotations

import contextlib
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from penstock.source import (
    SourceConnector,
)
from penstock.testing.crash.stage import as_rows

Rows = dict[str, list[Any]]
"""The rows of each stream, in order: a dict per row, or a tuple of stream, key and payload per envelope."""


class Comparing:
    """What the laws compare rows by."""

    ordered = True
    """True when the rows of a stream have one order, however they are cut into ranges and splits."""

    def _same(self, found: Rows, wanted: Rows, what: str, ordered: bool | None = None) -> None:
        for stream in sorted({*found, *wanted}):
            one, two = found.get(stream, []), wanted.get(stream, [])
            if not (self.ordered if ordered is None else ordered):
                one, two = sorted(one, key=repr), sorted(two, key=repr)
            if one != two:
                extra, missing = _but_not_in(one, two), _but_not_in(two, one)
                raise AssertionError(
                    f"{what} differ in stream {stream!r}: {len(one)} rows and {len(two)}; "
                    f"too many {extra[:3]}, missing {missing[:3]}"
                    + ("" if extra or missing else "; the rows are the same and their order is not")
                )


def kind(wanted: type[SourceConnector[Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test only for sources of that kind."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        test.kind = wanted  # type: ignore[attr-defined]
        return test

    return mark


@contextlib.contextmanager
def opened_source(source: Any) -> Iterator[Any]:
    """A copy of the source as another process gets it, open."""
    copy = pickle.loads(pickle.dumps(source))
    copy.open()
    try:
        yield copy
    finally:
        copy.close()


def joined(pieces: Sequence[Rows]) -> Rows:
    found: Rows = defaultdict(list)
    for piece in pieces:
        for stream, rows in piece.items():
            found[stream] += rows
    return dict(found)


def expected_rows(expected: Any, found: Rows) -> Rows:
    """What a fixture says, by stream; with only one stream it need not name it."""
    if isinstance(expected, dict):
        return {stream: _plain(rows) for stream, rows in expected.items()}
    assert len(found) <= 1, f"give `expected` by stream, there are {sorted(found)}"
    return {next(iter(found), ""): _plain(expected)}


def _plain(rows: Any) -> list[Any]:
    if isinstance(rows, pa.RecordBatch | pa.Table):
        return rows.to_pylist()  # type: ignore[no-any-return]
    return [row if isinstance(row, bytes) else as_rows([row])[0] for row in rows]


def _but_not_in(one: Sequence[Any], two: Sequence[Any]) -> list[Any]:
    left = list(two)
    extra = []
    for row in one:
        if row in left:
            left.remove(row)
        else:
            extra.append(row)
    return extra
