"""Tables with deletion vectors that others compact, change, vacuum and spoil meanwhile: whatever the order, no row is wrong."""

from __future__ import annotations

import json
import random
import shutil
import signal

import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from lake_readers import table_of
from sink_protocol import END, ORDERS, commit_in_a_process, stage

from penstock.changes import CHANGE_FIELDS
from penstock.connectors.delta import Delta, DeltaConfig, entries, marking, purge, upkeep
from penstock.connectors.delta import apply as applying
from penstock.connectors.lake import index
from penstock.errors import PlanStale
from penstock.schema import with_key
from penstock.sink import Epoch, Task
from penstock.testing.readers import DuckDB, is_installed

PLAIN = pa.schema([("id", pa.int64()), ("name", pa.string()), ("doc", pa.string())])
CHANGES = with_key(pa.schema([*PLAIN, *CHANGE_FIELDS]), ["id"])
KEYS = 120


class Shared:
    """A table that two pipelines and strangers write, and a dict of what it must hold."""

    def __init__(self, home, chance, monkeypatch):
        self.home, self.chance = home, chance
        self.target = home / "out/lake/orders"
        self.state = {}
        self.numbers = {"shop": 0, "till": 0}
        self.monkeypatch = monkeypatch
        self.sinks = {}
        self.parts = home / "old-parts"
        for pipeline in self.numbers:
            self.restart(pipeline)
        self.epoch("shop", seeds=True)

    def restart(self, pipeline):
        options = {
            "purge_percent": self.chance.choice([5, 40, 100]),
            "optimize_every_epochs": 4,
            "vacuum_every_secs": 0,
        }
        config = DeltaConfig(path=f"{self.home}/out/{{topic}}", mode="upsert", key=["id"], apply="vectors", **options)
        self.sinks[pipeline] = Delta(config)
        self.sinks[pipeline].open()

    def changes(self, number, seeds):
        """Changes of one epoch, applied to the dict; updates may leave `doc` out or move the row to another key."""
        chance, state, events = self.chance, self.state, []
        for place in range(60 if seeds else chance.randrange(1, 25)):
            id, name = place if seeds else chance.randrange(KEYS), f"{number}-{place}"
            kind = "write" if seeds or id not in state else chance.choice(["write", "keep", "move", "delete"])
            if kind == "delete":
                events.append({"_op": "d", "id": id})
                del state[id]
                continue
            doc = state[id][1] if kind in ("keep", "move") else f"doc {name}"
            event = {"_op": "u", "id": id, "name": name, "doc": doc}
            if kind != "write":
                event |= {"doc": None, "_unchanged": ["doc"]}
            if kind == "move" and (free := [each for each in range(KEYS) if each not in state]):
                event |= {"id": chance.choice(free), "_old_key": json.dumps({"id": id})}
                del state[id]
            state[event["id"]] = (name, doc)
            events.append(event)
        found = [{"_position": f"{place:06d}", **event} for place, event in enumerate(events)]
        return pa.RecordBatch.from_pylist(found, schema=CHANGES)

    def epoch(self, pipeline, seeds=False, dies=False, between=None):
        self.numbers[pipeline] += 1
        epoch = Epoch(pipeline, "one", self.numbers[pipeline])
        sink = self.sinks[pipeline]
        receipts = [stage(sink, epoch, self.changes(self.numbers[pipeline], seeds))]
        if dies:  # its vectors and files are written, its entry is not; or both are, and nobody knows
            hook = (
                "" if self.chance.random() < 0.5 else "table.Table.sync = lambda self, version: os.kill(os.getpid(), 9)"
            )
            failpoint = "" if hook else "commit.before=kill"
            assert commit_in_a_process(sink, epoch, receipts, failpoint, hook) == -signal.SIGKILL
            self.restart(pipeline)
            sink = self.sinks[pipeline]
        self.monkeypatch.setattr(Delta, "small_rows", self.chance.choice([0, 1_000_000]))
        for turn in range(5):
            work = sink.plan_apply(epoch, ORDERS, receipts)
            applied = [sink.apply(epoch, each, Task(place)) for place, each in enumerate(work)]
            if between is not None and not turn:
                between()
            try:
                if work:
                    sink.commit_applied(epoch, ORDERS, receipts, END, applied)
                else:
                    sink.commit_epoch(epoch, receipts, END)
            except PlanStale:
                continue
            break
        else:
            raise AssertionError("the plan was stale five times, with one commit in between")
        sink.sweep(epoch, receipts)

    # -- strangers -------------------------------------------------------------------------------------------------

    def compact(self):
        DeltaTable(str(self.target)).optimize.compact()

    def delete(self):
        id = self.chance.randrange(KEYS)
        DeltaTable(str(self.target)).delete(f"id = {id}")
        self.state.pop(id, None)

    def append(self):
        free = [each for each in range(KEYS) if each not in self.state]
        for id in free[:1]:
            write_deltalake(
                str(self.target), pa.table({"id": [id], "name": ["theirs"], "doc": ["their doc"]}), mode="append"
            )
            self.state[id] = ("theirs", "their doc")

    def vacuum(self):
        found = DeltaTable(str(self.target))
        found.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)

    def checkpoint(self):
        found = DeltaTable(str(self.target))
        found.create_checkpoint()
        for version in range(found.version()):
            (self.target / "_delta_log" / f"{version:020d}.json").unlink(missing_ok=True)

    def spoil_index(self):
        """Parts are deleted, come back from an older copy, or lie under the names of others."""
        here = self.target / "_penstock/.index"
        deed = self.chance.choice(["delete", "copy", "restore", "swap"])
        if deed == "copy" and here.exists():
            shutil.copytree(here, self.parts, dirs_exist_ok=True)
        elif deed == "restore" and self.parts.exists():
            for part in self.parts.iterdir():
                put(here / part.name, part.read_bytes())
        elif deed == "swap" and here.exists() and len(parts := sorted(here.iterdir())) > 1:
            one, other = self.chance.sample(parts, 2)
            held = one.read_bytes()
            put(one, other.read_bytes())
            put(other, held)
        else:
            shutil.rmtree(here, ignore_errors=True)
        self.restart(self.chance.choice(sorted(self.numbers)))  # what is in memory is no longer asked

    def remove_dead(self):
        self.restart("shop")
        table = self.sinks["shop"].target(ORDERS).load()
        upkeep.remove_dead_files(table)
        upkeep.remove_dead_vectors(table)

    def step(self):
        chance, pipeline = self.chance, self.chance.choice(sorted(self.numbers))
        others = [
            self.compact,
            self.delete,
            self.append,
            self.vacuum,
            self.checkpoint,
            self.spoil_index,
            self.remove_dead,
        ]
        deed = chance.random()
        if deed < 0.25:
            chance.choice(others)()
        elif deed < 0.4:
            self.epoch(pipeline, dies=True)
        elif deed < 0.6:
            self.epoch(pipeline, between=chance.choice([self.compact, self.vacuum, self.checkpoint, self.spoil_index]))
        else:
            self.epoch(pipeline)

    def holds(self, found):
        rows = [(row["id"], (row["name"], row["doc"])) for row in found]
        assert len(rows) == len(self.state)
        assert dict(rows) == self.state


def put(path, data):
    """A file in the place of another one: a process that has mapped the old one goes on with it."""
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").rename(path)


def run(home, seed, steps, duckdb, monkeypatch):
    shared = Shared(home, random.Random(seed), monkeypatch)
    for _ in range(steps):
        shared.step()
        shared.holds(table_of(shared.target).to_pylist())
    shared.holds(polars.scan_delta(str(shared.target)).collect().to_dicts())
    shared.holds(duckdb.rows(f"select id, name, doc from delta_scan('{shared.target}')"))
    named = shared.sinks["shop"].target(ORDERS).load().entries.vector_files()
    assert named <= {path.name for path in shared.target.glob("deletion_vector_*.bin")}


@pytest.fixture(scope="module")
def duckdb(need):
    need(is_installed(), "the DuckDB of penstock.testing.readers is not installed")
    with DuckDB() as process:
        yield process


@pytest.fixture(autouse=True)
def _takes_few_rows_for_many(monkeypatch):
    monkeypatch.setattr(marking, "MARKED_ROWS", 0)
    monkeypatch.setattr(index, "STORED_ROWS", 5)
    monkeypatch.setattr(applying, "PURGE_HERE_ROWS", 30)
    monkeypatch.setattr(applying, "PURGE_ROWS", 40)
    for name, value in (("PART_ROWS", 15), ("FEWEST_PARTS", 1), ("_PIECE_ROWS", 5), ("_BUFFER_BYTES", 1)):
        monkeypatch.setattr(purge, name, value)
    monkeypatch.setattr(entries, "THIN", 1)


def test_two_pipelines_strangers_and_kills_on_one_table_leave_what_the_changes_say(tmp_path, duckdb, monkeypatch):
    run(tmp_path, 7, 14, duckdb, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_many_orders_of_pipelines_strangers_and_kills(tmp_path, duckdb, monkeypatch, seed):
    run(tmp_path, 100 + seed, 40, duckdb, monkeypatch)
