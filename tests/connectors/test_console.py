"""The console sink: the first rows of an epoch, printed once on the driver, with honest totals."""

import datetime as dt
import json
import pickle
from decimal import Decimal

import pyarrow as pa
import pytest

from penstock.connectors.console import Console, ConsoleConfig, Shown
from penstock.durable import canonical
from penstock.errors import FatalError
from penstock.sink import Epoch, SinkConnectorCapabilities, Task

EPOCH = Epoch("p", "i", 7)


def stage(sink, **batches):
    """One task's receipt, as it comes back out of a manifest."""
    task = pickle.loads(pickle.dumps(sink))
    task.open()
    task.begin_epoch(EPOCH, Task(0))
    for topic, rows in batches.items():
        for chunk in rows:
            task.write_batch(f"/{topic}", pa.RecordBatch.from_pylist(chunk))
    receipt = task.pre_commit(EPOCH)
    task.close()
    return Shown.model_validate(json.loads(canonical(receipt.model_dump(mode="json"))))


def rows(*ids):
    return [{"z": id, "a": f"row {id}"} for id in ids]


def test_nothing_is_printed_before_the_commit(capsys):
    stage(Console(ConsoleConfig()), orders=[rows(1, 2)])
    assert capsys.readouterr().out == ""


def test_json_lines_are_all_there_is_on_stdout_with_columns_in_order(capsys):
    sink = Console(ConsoleConfig(format="jsonl", max_rows=3))
    receipts = [stage(sink, orders=[rows(1), rows(2)]), stage(sink, orders=[rows(3, 4, 5)], users=[rows(9)])]
    sink.commit_epoch(EPOCH, receipts, {})
    out, err = capsys.readouterr()
    assert out.splitlines() == [json.dumps(row) for row in rows(1, 2, 3, 9)]
    assert err.splitlines() == ["/orders · epoch 7 · 3 of 5 rows", "/users · epoch 7 · 1 of 1 rows"]


def test_the_table_shows_the_rows_and_the_totals(capsys):
    sink = Console(ConsoleConfig(max_rows=2))
    sink.commit_epoch(EPOCH, [stage(sink, orders=[rows(1, 2, 3)])], {})
    out = capsys.readouterr().out
    assert "/orders · epoch 7 · 2 of 3 rows" in out
    assert "row 1" in out
    assert "row 2" in out
    assert "row 3" not in out


def test_no_rows_still_shows_totals(capsys):
    sink = Console(ConsoleConfig(max_rows=0))
    sink.commit_epoch(EPOCH, [stage(sink, orders=[rows(1, 2, 3)])], {})
    assert capsys.readouterr().out.strip() == "/orders · epoch 7 · 0 of 3 rows"


def test_every_common_type_becomes_json(capsys):
    row = {
        "i": 1, "f": float("nan"), "b": b"\x00\xff", "d": Decimal("1.50"), "t": dt.datetime(2024, 1, 2, tzinfo=dt.UTC),
        "day": dt.date(2024, 1, 2), "list": [1, None], "struct": {"x": dt.date(2024, 1, 2)}, "none": None,
    }  # fmt: skip
    sink = Console(ConsoleConfig(format="jsonl"))
    sink.commit_epoch(EPOCH, [stage(sink, t=[[row]])], {})
    assert json.loads(capsys.readouterr().out) == {
        "i": 1, "f": "nan", "b": "AP8=", "d": "1.50", "t": "2024-01-02T00:00:00+00:00",
        "day": "2024-01-02", "list": [1, None], "struct": {"x": "2024-01-02"}, "none": None,
    }  # fmt: skip


def test_a_receipt_stays_small_whatever_the_rows_are():
    sink = Console(ConsoleConfig(max_rows=10))
    receipt = stage(sink, t=[[{"id": i, "blob": "x" * 1_000_000, "more": ["y" * 1_000_000]} for i in range(20)]])
    assert len(receipt.model_dump_json()) < 200_000
    assert json.loads(receipt.rows["/t"][0])["id"] == 0
    assert receipt.total == {"/t": 20}


def test_rows_cannot_steer_the_terminal(capsys):
    sink = Console(ConsoleConfig())
    sink.commit_epoch(EPOCH, [stage(sink, t=[[{"[red]x": "\x1b[2J[bold]hi\x9b"}]])], {})
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x9b" not in out
    assert "[bold]hi" in out


def test_a_closed_terminal_is_a_clear_error(monkeypatch):
    class Closed:
        encoding = "utf-8"

        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

    sink = Console(ConsoleConfig(format="jsonl"))
    receipt = stage(sink, t=[rows(1)])
    monkeypatch.setattr("sys.stdout", Closed())
    with pytest.raises(FatalError, match="PEN-5010"):
        sink.commit_epoch(EPOCH, [receipt], {})


def test_it_promises_nothing():
    assert Console.capabilities == SinkConnectorCapabilities()
    assert Console(ConsoleConfig()).committed_epoch("p", "/t") is None
