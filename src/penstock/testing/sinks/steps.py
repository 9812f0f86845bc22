"""The steps that the laws of sinks are made of: rows, epochs, staging, committing, looking at the target."""

from __future__ import annotations

import contextlib
import inspect
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from penstock.durable import canonical
from penstock.schema import with_key
from penstock.sink import (
    CommittedEpoch,
    Epoch,
    Receipt,
    SinkConnector,
    SinkContext,
    Task,
    Topic,
)
from penstock.testing.crash.stage import as_rows

Sink = SinkConnector[Any, Any]


Visible = Callable[..., Any]


TOPIC: Topic = "/lake/orders"


OTHER: Topic = "/lake/returns"


END = {"kit": {"index": 7}}


def needs(*flags: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test only for sinks whose capabilities have all of `flags`."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        test.needs = flags  # type: ignore[attr-defined]
        return test

    return mark


def rows(first: int, count: int = 10, name: str | None = None) -> pa.RecordBatch:
    """The rows that the contract writes: `id` is their key."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("part", pa.string())])
    ids = range(first, first + count)
    names = [name or f"row {id}" for id in ids]
    return pa.record_batch([list(ids), names, [f"part {id % 3}" for id in ids]], schema=with_key(schema, ["id"]))


def epoch_of(number: int, incarnation: str = "one", **more: Any) -> Epoch:
    return Epoch("kit", incarnation, number, **more)


@contextlib.contextmanager
def opened_sink(sink: Sink, context: SinkContext = SinkContext()) -> Iterator[Sink]:
    """A copy of the sink as another process gets it, open."""
    copy: Sink = pickle.loads(pickle.dumps(sink))
    copy.open(context)
    try:
        yield copy
    finally:
        copy.close()


def stage(
    sink: Sink, epoch: Epoch, *batches: pa.RecordBatch, topic: Topic = TOPIC, task: int = 0, through_json: bool = True
) -> Receipt:
    """One task from its start to its receipt, which then is as the manifest keeps it."""
    with opened_sink(sink) as opened:
        opened.begin_epoch(epoch, Task(task))
        for batch in batches:
            opened.write_batch(topic, batch)
        receipt: Receipt = opened.pre_commit(epoch)
    if not through_json:
        return receipt
    return sink.receipt_type.model_validate(json.loads(canonical(receipt.model_dump(mode="json"))))


def commit(sink: Sink, epoch: Epoch, receipts: Sequence[Receipt], end: Any = None) -> None:
    with opened_sink(sink) as opened:
        opened.commit_epoch(epoch, receipts, END if end is None else end)


def marker_of(sink: Sink) -> CommittedEpoch | None:
    with opened_sink(sink) as opened:
        return opened.committed_epoch("kit", TOPIC)


def read_target(visible: Visible, topic: Topic) -> Any:
    return visible(topic) if inspect.signature(visible).parameters else visible()


def visible_rows(
    visible: Visible, topic: Topic = TOPIC, columns: Sequence[str] = ("id", "name", "part")
) -> list[dict[str, Any]]:
    found = sorted(as_rows(read_target(visible, topic)), key=lambda row: int(row["id"]))
    return [{column: row[column] for column in columns} for row in found]


def ids_of(visible: Visible, topic: Topic = TOPIC) -> list[int]:
    return [row["id"] for row in visible_rows(visible, topic, ("id",))]
