"""
Change capture from PostgreSQL into Delta under fire: kills and restarts, huge transactions, many rows, long idleness.

`PARTS=a,b` chooses parts: their results join those of the others in the result file. `SOAK_SCALE=0.02` makes all of it
smaller, for a look whether it works, and records nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import psycopg
import psycopg.rows
from deltalake import DeltaTable

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import postgres
from measure import PAGE, RESULTS, commit, machine, page

from penstock.connectors.postgres_cdc import PostgresCdcConfig
from penstock.connectors.postgres_cdc.catalog import find_tables
from penstock.connectors.postgres_cdc.log import slot
from penstock.connectors.postgres_cdc.log.lsn import lsn_int
from penstock.connectors.postgres_cdc.position import LogPosition
from penstock.connectors.postgres_cdc.tables import Captured
from penstock.runtime.epochs import Manifest, State
from penstock.testing.postgres import PostgresServer

SCALE = float(os.environ.get("SOAK_SCALE", 1))
SEED = int(os.environ.get("SOAK_SEED", time.time_ns() % 1_000_000))
PARTS = os.environ.get("PARTS", "a,b,c,d").split(",")

RUNS = max(1, round(20 * SCALE))
ROWS = max(2_000, round(20_000 * min(1.0, SCALE)))
"""Rows that each table of a run begins with."""
TRANSACTION_ROWS = round(5_000_000 * SCALE)
MANY_ROWS = round(20_000_000 * SCALE)
"""Half of them copied, half of them streamed."""
IDLE_SECS = max(15, round(180 * SCALE))

STUCK_SECS = 600
"""After so long without an end a run counts as stuck."""
HEARTBEAT_SECS = 2
IDLE_LIMIT_BYTES = 128 << 20
"""Much more than is written between two heartbeats, and much less than all that is written."""

PIPELINE = """
connector_name = "soak-cdc"
delivery = "exactly-once"

[processing]
state_dir = "state"
epoch_interval_ms = 50

[source]
connector = "postgres_cdc"
dsn = "{dsn}"
tables = {tables}
slot = "{slot}"
seed_chunk_rows = {chunk_rows}
heartbeat_secs = {heartbeat}

[[routes]]
from = "public.*"
to = "/{{stream}}"
"""
UPSERT = """
[[sinks]]
name = "mirror"
connector = "delta"
path = "mirror/{topic}"
mode = "upsert"
"""
CHANGES = """
[[sinks]]
name = "log"
connector = "delta"
path = "log/{topic}"
mode = "changes"
"""

TABLES = {"orders": ("id",), "items": ("region", "number")}
"""With their keys."""
SHOP = f"""
    CREATE SEQUENCE stamps;
    CREATE TABLE orders (id int8 PRIMARY KEY, version int8 NOT NULL DEFAULT 0, stamp int8 NOT NULL DEFAULT nextval('stamps'),
        note text, story text, amount numeric(12, 2));
    CREATE TABLE items (region text, number int4, version int8 NOT NULL DEFAULT 0,
        stamp int8 NOT NULL DEFAULT nextval('stamps'), at timestamptz DEFAULT now(), PRIMARY KEY (region, number));
    CREATE TABLE audit (stamp int8, name text, key jsonb, version int8);
    CREATE FUNCTION count_up() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        NEW.version := OLD.version + 1; NEW.stamp := nextval('stamps'); RETURN NEW;
    END $$;
    CREATE FUNCTION write_down() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO audit VALUES (NEW.stamp, TG_TABLE_NAME,
            CASE TG_TABLE_NAME WHEN 'orders' THEN jsonb_build_array(to_jsonb(NEW) -> 'id')
                ELSE jsonb_build_array(to_jsonb(NEW) -> 'region', to_jsonb(NEW) -> 'number') END, NEW.version);
        RETURN NULL;
    END $$;
    INSERT INTO orders (id, note, story) SELECT i, 'n' || i,
        CASE WHEN i % 20 = 0 THEN (SELECT string_agg(md5(i || ' ' || j), '') FROM generate_series(1, 100) j) END
        FROM generate_series(1, {ROWS}) i;
    INSERT INTO items (region, number) SELECT chr(97 + i % 5), i FROM generate_series(1, {ROWS}) i;
    CREATE TRIGGER count_up BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION count_up();
    CREATE TRIGGER count_up BEFORE UPDATE ON items FOR EACH ROW EXECUTE FUNCTION count_up();
    CREATE TRIGGER write_down AFTER INSERT OR UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION write_down();
    CREATE TRIGGER write_down AFTER INSERT OR UPDATE ON items FOR EACH ROW EXECUTE FUNCTION write_down();
"""
"""Every write of a row counts its `version` up by one and takes a `stamp`, and `audit` keeps both in its transaction."""


# -- the pipeline ----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A pipeline in a directory of its own, started as often as it takes, and killed."""

    home: Path
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    kills: Counter[str] = field(default_factory=Counter)

    def start(self, *options: str) -> None:
        with open(self.home / "run.log", "ab") as log:
            command = [sys.executable, "-m", "penstock", "run", str(self.home / "pipeline.toml"), *options]
            self.process = subprocess.Popen([*command, "--master", "local[2]"], stdout=log, stderr=log)
        self.restarts += 1

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self, kind: str) -> None:
        """SIGKILL the driver, its JVM or one of the Python workers, if there is one by now."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self.process.pid)
            below = driver.children(recursive=True)
            found = [driver] if kind == "driver" else [p for p in below if (p.name() == "java") == (kind == "jvm")]
            if found:
                found[-1].send_signal(signal.SIGKILL)
                self.kills[kind] += 1
        if kind == "driver":
            self.process.wait()

    def until(self, reached: Callable[[], Any], what: str, watch: Callable[[], None] = lambda: None) -> None:
        """Wait, and start the pipeline again whenever it has ended."""
        deadline = time.monotonic() + STUCK_SECS
        while not reached():
            watch()
            if not self.alive():
                self.start()
            if time.monotonic() > deadline:
                raise Stuck(f"{what} did not come within {STUCK_SECS} s:\n{self.log[-4000:]}")
            time.sleep(0.05)

    def drain(self) -> None:
        """Read everything that is there, and end."""
        if self.alive():
            assert self.process is not None
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(STUCK_SECS)
        self.start("--drain")
        assert self.process is not None
        if self.process.wait(STUCK_SECS):
            raise Stuck(f"the drain ended with {self.process.returncode}:\n{self.log[-4000:]}")

    def close(self) -> None:
        if self.alive():
            assert self.process is not None
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> str:
        return (self.home / "run.log").read_text(errors="replace")

    @property
    def newest(self) -> Manifest | None:
        try:
            return State(self.home / "state", "soak-cdc").peek().newest
        except FileNotFoundError:  # between two manifests
            return None

    @property
    def epoch(self) -> int:
        files = (self.home / "state" / "epochs").glob("[0-9]*.json")
        return max((int(file.stem) for file in files), default=0)

    def position(self) -> LogPosition | None:
        """Where the next epoch starts; None before the first one is committed, and while a table is copied or will be."""
        newest = self.newest
        if newest is None or newest.state != "committed":
            return None
        end = LogPosition.model_validate(newest.ranges["postgres_cdc"].end)
        position = end.after(newest.notes.get("postgres_cdc", []), retried=True)
        return None if position.copying else position


class Stuck(Exception):
    """A pipeline did not come to where it had to."""


@contextlib.contextmanager
def pipeline(dsn: str, tables: Sequence[str], sinks: str, slot: str, chunk_rows: int) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as name:
        text = PIPELINE.format(
            dsn=dsn, tables=json.dumps(tables), slot=slot, chunk_rows=chunk_rows, heartbeat=HEARTBEAT_SECS
        )
        (Path(name) / "pipeline.toml").write_text(text + sinks)
        run = Run(Path(name))
        try:
            yield run
        finally:
            run.close()


class Peaks:
    """The most memory that the driver, its JVM and all its workers together held, in MiB; shared pages count once."""

    def __init__(self, run: Run) -> None:
        self.mib: Counter[str] = Counter()
        self._run = run
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.25):
            held: Counter[str] = Counter()
            with contextlib.suppress(psutil.NoSuchProcess):
                driver = psutil.Process(self._run.process.pid) if self._run.process else None
                for process in (driver, *driver.children(recursive=True)) if driver else ():
                    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                        kind = "driver" if process == driver else "jvm" if process.name() == "java" else "workers"
                        held[kind] += process.memory_full_info().pss
            for kind, size in held.items():
                self.mib[kind] = max(self.mib[kind], round(size / 2**20))


# -- part a: kills, restarts, and all kinds of changes ---------------------------------------------------------------


class Workload:
    """Sessions that change the shop at random; they outlive restarts of the server."""

    def __init__(self, dsn: str, seed: int) -> None:
        self.dsn = dsn
        self.phase: Literal["copy", "settle", "stream"] = "copy"
        """What makes a table be copied again comes in the first phase only: behind it every change must be in the log."""
        self.done: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._names = 3
        self._seed = seed
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(random.Random(f"{seed}-{n}"), n)) for n in range(2)]

    def __enter__(self) -> Workload:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _run(self, chance: random.Random, number: int) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    with postgres.connect(self.dsn) as connection:
                        self._write(connection, chance, number)
                except psycopg.OperationalError:
                    self._stopped.wait(0.1)
        except BaseException as error:  # noqa: BLE001 (raised again, in the thread that waits)
            self.error = error

    def _write(self, connection: psycopg.Connection[Any], chance: random.Random, number: int) -> None:
        while not self._stopped.wait(0.004 + 0.02 * chance.random()):
            try:
                if number == 0 and chance.random() < 0.01 and (self.phase == "copy" or self._may("define")):
                    self._define(connection, chance)
                with connection.transaction():
                    for _ in range(chance.choice([1, 1, 1, 3, 8])):
                        self._change(connection, chance)
                    if chance.random() < 0.05:
                        raise psycopg.Rollback()
            except (psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
                self.done["given up"] += 1

    def _may(self, what: str) -> bool:
        # Both between two looks at the catalog would be taken for a table that ALTER TABLE has rewritten.
        return self.phase == "stream" and self._seed % 2 == (what == "define")

    def _define(self, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        """Columns come and go."""
        verb = chance.choice(["ADD COLUMN IF NOT EXISTS", "DROP COLUMN IF EXISTS"])
        # A name that comes back has another meaning, and is not seen in the log.
        new = self.phase != "copy" and verb.startswith("ADD")
        self._names = self._names + 1 if new else self._names
        table, column = chance.choice(list(TABLES)), f"more_{self._names if new else chance.randint(1, 3)}"
        connection.execute(f"ALTER TABLE {table} {verb} {column} {'text' if verb.startswith('ADD') else ''}")
        if verb.startswith("ADD"):
            connection.execute(f"UPDATE {table} SET {column} = 'x' || version WHERE version % 7 = 3")
        self.done["ALTER TABLE"] += 1

    def _change(self, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        key, other, region = chance.randint(1, ROWS + 500), chance.randint(1, ROWS + 500), chance.choice("abcdez")
        if chance.random() < 0.0005 and (self.phase == "copy" or self._may("truncate")):
            connection.execute(f"TRUNCATE {chance.choice(list(TABLES))}")
            self.done["TRUNCATE"] += 1
        statement = chance.choice(
            [
                f"INSERT INTO orders (id, note) SELECT i, 'new' FROM generate_series({key}, {key + 9}) i ON CONFLICT DO NOTHING",
                f"UPDATE orders SET note = 'u' || version WHERE id BETWEEN {key} AND {key + chance.choice([0, 0, 20, 100])}",
                f"UPDATE orders SET amount = version / 3.0 WHERE id % 20 = 0 AND id BETWEEN {key} AND {key + 100}",
                f"UPDATE orders SET story = repeat(md5(version::text), 200) WHERE id BETWEEN {key} AND {key + 2}",
                f"UPDATE orders SET id = {other} WHERE id = {key} AND NOT EXISTS (SELECT FROM orders WHERE id = {other})",
                f"DELETE FROM orders WHERE id BETWEEN {key} AND {key + 2}",
                f"INSERT INTO items VALUES ('{region}', {key}) ON CONFLICT DO NOTHING",
                f"UPDATE items SET at = now() WHERE region = '{region}' AND number BETWEEN {key} AND {key + 50}",
                f"UPDATE items SET region = '{region}' WHERE number = {key}",
                f"DELETE FROM items WHERE number BETWEEN {key} AND {key + 3}",
            ]
        )
        self.done[statement.partition(" ")[0]] += connection.execute(statement).rowcount


def part_a(server: PostgresServer) -> dict[str, Any]:
    """Twenty runs, each in a database of its own: seed, hand-over and stream with kills and restarts of the server."""
    results = [_one_run(server, number) for number in range(RUNS)]
    total: dict[str, Any] = {
        key: sum(each[key] for each in results) for key in ("lost", "doubled", "rows", "epochs", "restarts")
    }
    kills: Counter[str] = sum((Counter(each["kills"]) for each in results), Counter())
    return {**total, "kills": dict(kills), "runs": results}


def _one_run(server: PostgresServer, number: int) -> dict[str, Any]:
    chance, began, name = random.Random(f"{SEED}-{number}"), time.time(), f"run_{number}"
    with postgres.connect(server.dsn) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    dsn = server.dsn.rpartition("/")[0] + f"/{name}"
    with postgres.connect(dsn) as connection:
        connection.execute(SHOP)
    tables = [f"public.{table}" for table in TABLES]
    faults: Counter[str] = Counter()
    with pipeline(dsn, tables, UPSERT + CHANGES, name, max(200, ROWS // 8)) as run:
        with Workload(dsn, SEED + number) as work:
            run.start()
            for _ in range(chance.randint(1, 2)):  # in the middle of the copy, mostly
                _strike(run, server, chance, faults, chance.randint(1, 5))
            if chance.random() < 0.3:
                run.until(lambda: run.epoch >= 3, "the copy")
                with postgres.connect(dsn) as connection:
                    connection.execute("ALTER TABLE orders ADD COLUMN filled int DEFAULT 7")  # it is copied again
            work.phase = "settle"
            settled = _flushed(dsn)
            run.until(lambda: _is_settled(run, dsn, settled), "the end of the copy")
            with postgres.connect(dsn) as connection:
                (mark,) = connection.execute("SELECT last_value FROM stamps").fetchone() or (0,)
            work.phase = "stream"
            for _ in range(chance.randint(1, 3)):
                _strike(run, server, chance, faults, chance.randint(1, 8))
            goal = run.epoch + 3
            run.until(lambda: run.epoch >= goal, "some epochs more")
        run.drain()
        lost, doubled, rows = _verdict(dsn, run.home, mark)
        result = {
            "lost": lost,
            "doubled": doubled,
            "rows": rows,
            "epochs": run.epoch,
            "restarts": run.restarts - 1,
            "kills": dict(run.kills + faults),
            "work": dict(work.done),
            "seconds": round(time.time() - began),
        }
        if lost or doubled:
            print(run.log[-3000:], file=sys.stderr)
    with postgres.connect(server.dsn) as connection:
        connection.execute("SELECT pg_drop_replication_slot(%s)", [name])
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    print(f"  run {number + 1}/{RUNS}: {json.dumps(result)}", flush=True)
    return result


def _strike(run: Run, server: PostgresServer, chance: random.Random, faults: Counter[str], epochs: int) -> None:
    """After some epochs more: kill a process, or restart the server."""
    goal = run.epoch + epochs
    run.until(lambda: run.epoch >= goal, "some epochs")
    time.sleep(chance.uniform(0, 0.5))
    kind = chance.choices(["driver", "jvm", "worker", "fast", "immediate"], [5, 2, 2, 1, 1])[0]
    if kind in ("fast", "immediate"):
        server.restart("fast" if kind == "fast" else "immediate")
        faults[f"server {kind}"] += 1
    else:
        run.kill(kind)


def _flushed(dsn: str) -> int:
    with postgres.connect(dsn) as connection:
        row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        return lsn_int(row[0])


def _is_settled(run: Run, dsn: str, lsn: int) -> bool:
    """True once nothing is copied any more, and the tables are known as they are."""
    position = run.position()
    if position is None or position.copied or position.lsn < lsn:
        return False
    config = PostgresCdcConfig(dsn=dsn, tables=tuple(position.tables))
    with postgres.connect(dsn) as connection:
        found = find_tables(connection, config, slot.server(connection).version).captured
    known = {stream: position.tables[stream] for stream in found}
    return all(
        isinstance(state, Captured)
        and state.shape is not None
        and found[stream].shape.after(state.shape) == state.shape
        for stream, state in known.items()
    )


def _verdict(dsn: str, home: Path, mark: int) -> tuple[int, int, int]:
    """Rows lost and doubled in the mirror and in the log, and how many were compared."""
    lost = doubled = rows = 0
    with postgres.connect(dsn) as connection:
        for table, key in TABLES.items():
            with connection.cursor(row_factory=psycopg.rows.dict_row) as cursor:
                source = cursor.execute(f"SELECT * FROM {table}").fetchall()
            columns = [each[0] for each in connection.execute(f"SELECT * FROM {table} LIMIT 0").description or ()]
            mirror = _read(home / "mirror" / f"public.{table}")
            log = sorted(_read(home / "log" / f"public.{table}"), key=lambda row: str(row["_position"]))
            replayed, missing, repeated = replay(log, key)
            for name, target in (("mirror", mirror), ("log", replayed)):
                more, less = _difference(source, target, columns)
                if more or less:
                    print(f"{table}: {more} rows lost and {less} doubled in the {name}", file=sys.stderr)
                lost, doubled = lost + more, doubled + less
            audit = connection.execute(
                "SELECT key, version, stamp FROM audit WHERE name = %s AND stamp > %s", [table, mark]
            )
            wanted = Counter((tuple(key), version, stamp) for key, version, stamp in audit.fetchall())
            seen = Counter(
                (tuple(row[name] for name in key), row["version"], row["stamp"]) for row in log if row["_op"] in "cu"
            )
            unseen, twice = (wanted - seen).total(), sum(count - 1 for count in seen.values())
            if found := {
                k: v
                for k, v in {"missing": missing, "repeated": repeated, "unseen": unseen, "twice": twice}.items()
                if v
            }:
                print(f"{table}: {found}", file=sys.stderr)
            lost, doubled = lost + missing + unseen, doubled + repeated + twice
            rows += len(log) + len(mirror)
    return lost, doubled, rows


def _read(path: Path) -> list[dict[str, Any]]:
    return DeltaTable(str(path)).to_pyarrow_table().to_pylist()


def _difference(source: list[Any], target: list[Any], columns: list[str]) -> tuple[int, int]:
    ours, theirs = (Counter(tuple(row.get(name) for name in columns) for row in rows) for rows in (source, target))
    return (ours - theirs).total(), (theirs - ours).total()


def replay(log: list[dict[str, Any]], key: Sequence[str]) -> tuple[list[dict[str, Any]], int, int]:
    """
    The table that a log leads to, and how many changes it seems to lack or to have twice.

    A table that was altered is copied over what is there, and the log behind that copy still tells every change: its rows
    give values, and take no part in the count.
    """
    table: dict[tuple[Any, ...], dict[str, Any]] = {}
    versions: dict[tuple[Any, ...], int] = {}
    cleared = {number for row in log if row["_op"] == "t" and (number := _copy(row)) is not None}
    lost = doubled = 0
    for row in log:
        op, place = row["_op"], tuple(row[name] for name in key)
        if op == "t":
            table.clear()
            versions.clear()
            continue
        if op == "r" and (_copy(row) or 1) > 1 and _copy(row) not in cleared:
            table[place] = row
            continue
        old = tuple(json.loads(row["_old_key"])[name] for name in key) if row["_old_key"] else place
        before, version = table.pop(old, None), versions.pop(old, None)
        if op in "ud":
            lost += version is None or (op == "u" and row["version"] > version + 1)
            doubled += version is not None and op == "u" and row["version"] < version + 1
        else:
            doubled += version is not None
        if op == "d":
            continue
        if op == "u":
            row = {**row, **{name: (before or {}).get(name) for name in row["_unchanged"] or ()}}
        doubled += place in versions
        table[place], versions[place] = row, row["version"]
    return list(table.values()), lost, doubled


def _copy(row: dict[str, Any]) -> int | None:
    """The number of the copy that a row is of; None: it is a change, whose place in the log is even."""
    lsn, number = str(row["_position"]).split(".")
    return int(number, 16) // 2 if int(lsn, 16) % 2 else None


# -- parts b and c: much at a time, and much --------------------------------------------------------------------------


def part_b(server: PostgresServer) -> dict[str, Any]:
    """One transaction of five million rows into a mirror: memory stays bounded, and every value arrives."""
    with postgres.connect(server.dsn) as connection:
        connection.execute(f"CREATE TABLE huge ({postgres.COLUMNS})")
        connection.execute(f"INSERT INTO huge SELECT {postgres.ROW} FROM generate_series(1, 1000) i")
    with pipeline(server.dsn, ["public.huge"], UPSERT, "huge", 250_000) as run:
        run.start()
        run.until(lambda: run.position() is not None, "the copy")
        began = time.time()
        with postgres.connect(server.dsn) as connection:
            connection.execute(
                f"INSERT INTO huge SELECT {postgres.ROW} FROM generate_series(1001, {1000 + TRANSACTION_ROWS}::bigint) i"
            )
        written, committed = time.time() - began, _flushed(server.dsn)
        with Peaks(run) as peaks:
            run.until(lambda: _reached(run, committed), "the transaction")
        seconds = time.time() - began - written
        run.drain()
        lost, doubled = _compare(server.dsn, "huge", run.home / "mirror", TRANSACTION_ROWS + 1000)
        result = _figures(run, lost, doubled, TRANSACTION_ROWS + 1000)
    _drop(server, "huge")
    return {
        **result,
        "seconds_to_write": round(written),
        "seconds_to_mirror": round(seconds),
        "peak_mib": dict(peaks.mib),
    }


def part_c(server: PostgresServer) -> dict[str, Any]:
    """Twenty million rows into a log: one half is copied, the other is streamed behind it."""
    half = MANY_ROWS // 2
    with postgres.connect(server.dsn) as connection:
        connection.execute(f"CREATE TABLE many ({postgres.COLUMNS})")
        connection.execute(f"INSERT INTO many SELECT {postgres.ROW} FROM generate_series(1, {half}::bigint) i")
    with pipeline(server.dsn, ["public.many"], CHANGES, "many", 250_000) as run:
        run.start()
        began = time.time()
        writer = threading.Thread(target=_insert, args=(server.dsn, half + 1, 2 * half))
        with Peaks(run) as peaks:
            run.until(lambda: run.position() is not None, "the copy")
            copied = time.time() - began
            writer.start()  # not earlier: the copy would take its rows in as well
            run.until(lambda: not writer.is_alive(), "the writer")
            committed = _flushed(server.dsn)
            run.until(lambda: _reached(run, committed), "the end of the log")
        seconds = time.time() - began
        run.drain()
        lost, doubled = _compare(server.dsn, "many", run.home / "log", 2 * half)
        result = _figures(run, lost, doubled, 2 * half)
    _drop(server, "many")
    return {
        **result,
        "seconds_to_copy": round(copied),
        "seconds_in_all": round(seconds),
        "peak_mib": dict(peaks.mib),
    }


def _insert(dsn: str, first: int, last: int) -> None:
    with postgres.connect(dsn) as connection:
        for begin in range(first, last + 1, 50_000):
            end = min(begin + 49_999, last)
            connection.execute(f"INSERT INTO many SELECT {postgres.ROW} FROM generate_series({begin}, {end}::bigint) i")


def _reached(run: Run, lsn: int) -> bool:
    position = run.position()
    return position is not None and position.lsn >= lsn


def _compare(dsn: str, table: str, target: Path, rows: int) -> tuple[int, int]:
    """By values; if they differ, by keys, to tell what was lost and what was doubled."""
    try:
        postgres.compare(dsn, table, target, rows)
    except AssertionError as error:
        print(error, file=sys.stderr)
        ids = DeltaTable(str(target / f"public.{table}")).to_pyarrow_table(columns=["id"])["id"]
        distinct = len(ids.unique())
        return max(rows - distinct, 1), len(ids) - distinct
    return 0, 0


def _figures(run: Run, lost: int, doubled: int, rows: int) -> dict[str, Any]:
    return {
        "lost": lost,
        "doubled": doubled,
        "rows": rows,
        "epochs": run.epoch,
        "restarts": run.restarts - 2,  # the first start, and the drain
        "kills": {},
    }


def _drop(server: PostgresServer, table: str) -> None:
    with postgres.connect(server.dsn) as connection:
        connection.execute("SELECT pg_drop_replication_slot(%s)", [table])
        connection.execute("DROP PUBLICATION penstock")
        connection.execute(f"DROP TABLE {table}")


# -- part d: nothing for us, much for others -------------------------------------------------------------------------


def part_d(server: PostgresServer) -> dict[str, Any]:
    """An idle table on a busy server: the log that the slot holds back stays bounded, however much is written."""
    with postgres.connect(server.dsn) as connection:
        connection.execute(f"CREATE TABLE idle ({postgres.COLUMNS})")
        connection.execute("CREATE TABLE busy (id int8, filler text)")
        connection.execute(f"INSERT INTO idle SELECT {postgres.ROW} FROM generate_series(1, 1000) i")
    unread = held = 0
    with pipeline(server.dsn, ["public.idle"], UPSERT, "idle", 250_000) as run:
        run.start()
        run.until(lambda: run.position() is not None, "the copy")
        start, ends = _flushed(server.dsn), time.monotonic() + IDLE_SECS
        with postgres.connect(server.dsn) as connection:

            def write() -> None:
                nonlocal unread, held
                connection.execute("INSERT INTO busy SELECT i, repeat('x', 500) FROM generate_series(1, 2000) i")
                row = connection.execute(
                    "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), confirmed_flush_lsn)::int8, "
                    "pg_wal_lsn_diff(pg_current_wal_insert_lsn(), restart_lsn)::int8 "
                    "FROM pg_replication_slots WHERE slot_name = 'idle'"
                ).fetchone()
                assert row is not None
                unread, held = max(unread, row[0]), max(held, row[1])
                time.sleep(0.2)

            run.until(lambda: time.monotonic() > ends, "the end of the idle time", write)
            written = _flushed(server.dsn) - start
            connection.execute("DROP TABLE busy")
        run.drain()
        lost, doubled = _compare(server.dsn, "idle", run.home / "mirror", 1000)
        result = _figures(run, lost, doubled, 1000)
    _drop(server, "idle")
    # The server itself sets the place that decoding restarts from every 15 s.
    if SCALE == 1 and max(unread, held) > IDLE_LIMIT_BYTES:
        raise Stuck(f"the slot held {held:,} of {written:,} bytes of log, above {IDLE_LIMIT_BYTES:,}")
    most = {"most_wal_bytes_unread": unread, "most_wal_bytes_retained": held}
    return {**result, "idle_secs": IDLE_SECS, "wal_bytes_written": written, **most}


# -- all -------------------------------------------------------------------------------------------------------------


def main() -> None:
    chosen = {"a": part_a, "b": part_b, "c": part_c, "d": part_d}
    file = RESULTS / "soak-cdc.json"
    parts: dict[str, Any] = {}
    if SCALE == 1 and len(PARTS) < len(chosen) and file.exists():
        parts = json.loads(file.read_text())["parts"]
    for name in PARTS:
        print(f"part {name}: {chosen[name].__doc__}", flush=True)
        began = time.time()
        with postgres.server() as server:
            result = chosen[name](server)
        parts[name] = {**result, "seed": SEED, "seconds": round(time.time() - began), "commit": commit()}
        shown = {key: value for key, value in parts[name].items() if key != "runs"}
        print(f"part {name}: {json.dumps(shown)}", flush=True)
    kills: Counter[str] = sum((Counter(each["kills"]) for each in parts.values()), Counter())
    totals = ("restarts", "epochs", "rows", "lost", "doubled", "seconds")
    result = {
        "soak": "cdc",
        "seed": SEED,
        "kills": dict(kills),
        **{key: sum(each[key] for each in parts.values()) for key in totals},
        "commit": commit(),
        "machine": machine(),
        "parts": dict(sorted(parts.items())),
    }
    if SCALE == 1:
        RESULTS.mkdir(exist_ok=True)
        file.write_text(json.dumps(result, indent=2) + "\n")
        PAGE.write_text(page())
    print(f"lost {result['lost']} · doubled {result['doubled']}")
    if result["lost"] or result["doubled"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
