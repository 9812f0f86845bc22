"""A reader polls a Delta table while its writer is killed again and again: it sees whole epochs and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow as pa
import pytest
from sink_protocol import END, commit_in_a_process, epoch, stage

from penstock.connectors.delta import Delta, DeltaConfig

ROWS = 50

_READER = """
import sys
from pathlib import Path
import duckdb
from deltalake import DeltaTable
path, stop, rows = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
seen, polls = [], 0
last = False
while not last:
    last = stop.exists() and polls >= 3  # and then once more: the writer was done before it
    table = DeltaTable(path)
    found = table.to_pyarrow_table(columns=["id", "epoch"])
    files = [uri.removeprefix("file://") for uri in table.file_uris()]
    counts = duckdb.sql(f"select epoch, count(*), count(distinct id) from read_parquet({files}) group by 1").fetchall()
    theirs = found.group_by("epoch").aggregate([("id", "count"), ("id", "count_distinct")])
    assert sorted(zip(*(column.to_pylist() for column in theirs.columns))) == sorted(counts), "two engines differ"
    assert all(count == distinct == rows for _, count, distinct in counts), f"part of an epoch: {counts}"
    epochs = sorted(e for e, _, _ in counts)
    if not seen or seen[-1] != epochs:
        assert not seen or max(epochs) > max(seen[-1]), f"an epoch is gone: {seen[-1]}, then {epochs}"
        seen.append(epochs)
    polls += 1
    if polls == 1:
        print("ready", flush=True)
print(seen)
"""

_KILL = "lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)"
_DEATHS = [
    {"failpoint": "commit.before=kill"},
    {"hook": f"table.Table.sync = {_KILL}"},
    {"hook": f"lists.drop = {_KILL}"},
    {"hook": f"table.Table.replace = {_KILL}"},
]
"""Before the entry is made, after it, after the epoch is done, and while files are joined."""


@pytest.mark.parametrize("mode", [pytest.param("append", marks=pytest.mark.soak), "upsert"])
def test_readers_see_whole_epochs_while_the_writer_is_killed(tmp_path, mode):
    options = {"mode": mode, "key": ["id"] if mode == "upsert" else [], "target_file_rows": 10}
    sink = Delta(DeltaConfig(path=f"{tmp_path}/{{topic}}", optimize_every_epochs=1, **options))
    sink.open()

    def batch(number: int) -> pa.RecordBatch:
        first = number * ROWS if mode == "append" else 0
        return pa.record_batch({"id": range(first, first + ROWS), "epoch": [number] * ROWS})

    e = epoch(1)
    sink.commit_epoch(e, [stage(sink, e, batch(1))], END)
    stop = tmp_path / "stop"
    command = [sys.executable, "-c", _READER, str(tmp_path / "lake/orders"), str(stop), str(ROWS)]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert reader.stdout.readline() == "ready\n", reader.stderr.read()
        killed = 0
        for number in range(2, 14):
            e = epoch(number)
            receipts = [stage(sink, e, batch(number))]
            if number % 2:
                killed += commit_in_a_process(sink, e, receipts, **_DEATHS[number // 2 % len(_DEATHS)]) == -9
            sink.commit_epoch(e, receipts, END)
            sink.sweep(e, receipts)
        assert killed >= 4
    finally:
        stop.touch()
        out, err = reader.communicate(timeout=120)
    assert reader.returncode == 0, err
    assert json.loads(out)[-1] == (list(range(1, 14)) if mode == "append" else [13])
