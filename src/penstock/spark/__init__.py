"""The one bridge to Spark: each epoch is a Spark job whose tasks read splits and stage them in the sinks."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import pickle
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

import penstock
from penstock.changes import is_changelog
from penstock.durable import canonical, disk_errors
from penstock.errors import (
    ConfigError,
    ConnectorError,
    DataError,
    FatalError,
    RetryableError,
    SchemaError,
    from_text,
    is_of_stream,
)
from penstock.pipeline import Pipeline
from penstock.pipeline.routing import Route, Target, partition_of, split_by
from penstock.runtime.job import (
    ApplyJob,
    ApplyResult,
    Job,
    Part,
    Tally,
    TaskResult,
    Writer,
    is_plain,
    leaving_out,
    read_parts,
    run_task,
    run_work,
    write,
)
from penstock.schema import key_of, with_key
from penstock.sink import Task, Topic
from penstock.source import RangeSource, ReadLimit, SourceBatch
from penstock.spark.deletes import FilteredChanges
from penstock.spark.java import java_problem
from penstock.tables import Refused, TableSource

PER_EPOCH = {
    "Aggregate",
    "Distinct",
    "Deduplicate",
    "Join",
    "Window",
    "GlobalLimit",
    "LocalLimit",
    "Sort",
    "Intersect",
    "Except",
}
"""Operators whose answer depends on which rows happen to share an epoch."""

_ROW_BY_ROW = {"Project", "Filter", "SubqueryAlias", "View", "MapInArrow", "LogicalRDD", "LocalRelation", "Range"}
"""Operators that look at each change by itself, so that it is known what becomes of it."""

_JVM_LOCK_WAIT_SECS = 30.0

_BAD_SQL = "PEN-1012"

_RESULT = "result binary"

_ARROW_OPTIONS = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"

_LIGHT = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:MetaspaceSize=256m"
"""
For a JVM that only hands out tasks: without Java's second compiler, which takes a second of CPU to make such code faster,
and without marking a heap that is hardly used, beside the tasks, each time that classes are loaded.
"""

_WORKER_MEMORY = {
    # The threads of a task hand their memory on to each other: with a heap for each, a worker holds 60 MiB more.
    "MALLOC_ARENA_MAX": "1",
    # What one batch has freed, the next one takes. Given back to the system in between, it is zeroed page by page each
    # time: a tenth of what a worker does.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}

_SESSION = threading.Lock()
_users = 0
"""Engines that use the session which the first of them started; the last one ends it. Guarded by `_SESSION`."""


def engine_for(pipeline: Pipeline, spark: Any = None, *, master: str | None = None, alone: bool = False) -> SparkEngine:
    """The engine that runs a pipeline, in the caller's session if given. `alone`: this process runs nothing else."""
    log = pipeline.processing.state_dir / "spark.log"
    plain = alone and all(is_plain(route) for route in pipeline.router.effective)
    return SparkEngine(spark, master=master, name=pipeline.name, log=log, ship=pipeline.third_party, plain=plain)


class SparkEngine:
    """Runs jobs in a Spark session: its own, or the caller's."""

    def __init__(
        self,
        spark: Any = None,
        *,
        master: str | None = None,
        name: str = "penstock",
        log: Path | None = None,
        ship: Sequence[Path] = (),
        plain: bool = False,
    ) -> None:
        """`plain`: no rows will ever enter the JVM, which nobody else uses, so it need not be ready to work on them."""
        self.session = spark
        self._given = spark is not None
        self._shared = False
        self.master = master
        self._name = name
        self._log = log
        self._ship = ship
        self._plain = plain
        self._jvm_lock: Any = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._seeds: dict[int, Any] = {}

    def start(self) -> None:
        """Start Spark, or join the caller's session; takes seconds, so it runs while the connectors open."""
        if not self._given:
            problem = java_problem()
            if problem:
                raise problem
            self._join()
        elif not hasattr(self.session, "_jsparkSession"):
            raise ConfigError(
                "the session is a Spark Connect one, and tasks need the driver's own SparkContext",
                code="PEN-1009",
                hint="make it with SparkSession.builder.master(…), not with remote(…)",
            )
        self._context = self.session.sparkContext
        own = () if str(self._context.master).startswith("local[") else (Path(penstock.__file__).parent,)
        for path in (*own, *self._ship):
            if self._scratch is None:  # kept until this process ends: an executor that starts late fetches from there
                self._scratch = tempfile.TemporaryDirectory(prefix="penstock-")
            self._context.addPyFile(str(_archive(path, Path(self._scratch.name))))

    def _join(self) -> None:
        """Start a session, or share the one that this process has: there can be only one."""
        global _users
        from pyspark import SparkContext

        with _SESSION:
            strangers = SparkContext._active_spark_context is not None and not _users
            self.session = _session(self.master, self._name, self._log, self._plain)
            if not strangers:
                self._shared = True
                _users += 1

    def hold(self, lock: Path) -> None:
        """Hold a lock inside the driver's JVM, which outlives a killed Python by seconds; waits for an older JVM to end."""
        channel = self.session._jvm.java.io.RandomAccessFile(str(lock.absolute()), "rw").getChannel()
        give_up = time.monotonic() + _JVM_LOCK_WAIT_SECS
        while (held := _try_lock(channel)) is None:
            if time.monotonic() > give_up:
                raise FatalError(
                    f"the JVM of an earlier run still holds {lock}",
                    code="PEN-5002",
                    hint="end the java process that runs Spark for this state directory",
                )
            time.sleep(0.1)
        self._jvm_lock = (channel, held)

    def stop(self) -> None:
        """Let go of the lock, and end the session if it is ours and nobody else's."""
        global _users
        if self._jvm_lock:
            with contextlib.suppress(Exception):  # the JVM may be gone already, and the lock with it
                self._jvm_lock[0].close()
            self._jvm_lock = None
        if self._shared:
            with _SESSION:
                self._shared = False
                _users -= 1
                if not _users:
                    _end(self.session)
        if not self._given:
            self.session = None

    @property
    def parallelism(self) -> int:
        with _driver_errors():
            return max(1, int(self._context.defaultParallelism))

    @property
    def version(self) -> str:
        return f"Spark {self.session.version} on {self._context.master}"

    def busy(self) -> bool:
        """True while tasks run."""
        try:
            with _driver_errors():
                return bool(self._context.statusTracker().getActiveStageIds())
        except ConnectorError:  # the job tells it better
            return False

    def check(self, routes: Sequence[tuple[Target, pa.Schema]], keyed: Collection[str] = ()) -> None:
        """Analyse the SQL of each route against its topic's schema; refuse what is wrong or works per epoch unasked."""
        for target, schema in routes:
            route, topic = target.route, target.topic
            if is_plain(route):
                continue
            session = _clone(self.session)
            frame = _transformed(session, route, topic, session.createDataFrame([], _spark_schema(schema, topic)))
            if route.sql is not None and "View (`input`" not in str(frame._jdf.queryExecution().analyzed().toString()):
                raise ConfigError(
                    f"{_name(route, topic)} does not read `input`, so the rows of the topic would go nowhere",
                    code="PEN-1012",
                    hint="select FROM input",
                )
            nodes = set(_nodes(frame._jdf.queryExecution().analyzed()))
            if nodes & PER_EPOCH and not route.per_epoch:
                raise ConfigError(
                    f"{_name(route, topic)} uses {', '.join(sorted(nodes & PER_EPOCH))}, which would see one epoch at a time",
                    code="PEN-1017",
                    hint="set `per_epoch = true` on the route if that is what you want",
                )
            twice = sorted({column for column in frame.columns if frame.columns.count(column) > 1})
            if twice:
                raise ConfigError(
                    f"{_name(route, topic)} makes two columns named {', '.join(twice)}",
                    code="PEN-1012",
                    hint="give one of them another name with AS",
                )
            if "_op" in schema.names:
                lost = [c for c in (*key_of(schema), "_op", "_position") if c not in frame.columns]
                if lost:
                    raise ConfigError(
                        f"{_name(route, topic)} drops {', '.join(lost)}, without which a change cannot be applied",
                        code="PEN-1012",
                        hint=f"select {', '.join(lost)} as well",
                    )
                changed = [c for c in (*key_of(schema), "_op", "_position") if c in _computed(frame)]
                if changed:
                    raise ConfigError(
                        f"{_name(route, topic)} changes {', '.join(changed)}, by which a change finds its row",
                        code="PEN-1012",
                        hint="select it as it is, and give what is computed from it another name",
                    )
                mixing = sorted(nodes - _ROW_BY_ROW) if set(target.sinks).intersection(keyed) else []
                if mixing:
                    raise ConfigError(
                        f"{_name(route, topic)} uses {', '.join(mixing)}, and the sink applies its rows by key: "
                        "of a change that is mixed with others nobody can tell what it leaves of its row",
                        code="PEN-1012",
                        hint='only select and filter there, or write to a sink with mode = "changes"',
                    )

    def run(self, job: Job) -> Sequence[TaskResult]:
        """Stage one epoch: one Spark job for all passthrough routes, and one for each topic that SQL makes."""
        routes = job.router.effective
        results: list[TaskResult] = []
        with _driver_errors():
            self._context.setJobGroup(job.epoch.pipeline, str(job.epoch), False)
            if any(is_plain(route) for route in routes):
                results += self._passthrough(job)
            for target, schemas in _sql_targets(job).items():
                try:
                    with _driver_errors(), _row_errors(target):
                        results += self._sql(job, target, merged(schemas, target.topic))
                except ConnectorError as error:
                    if not is_of_stream(error) and error.code != _BAD_SQL:
                        raise  # such as of a connector that could not be opened
                    results.append(_without(job, target, error))
        return results

    def apply(self, job: ApplyJob) -> Sequence[ApplyResult]:
        """Do the work that an epoch's commits need: one more Spark job."""
        groups = job.groups(4 * self.parallelism)
        with _driver_errors():
            self._context.setJobGroup(job.epoch.pipeline, f"{job.epoch} · apply", False)
            found = self._empty(len(groups)).mapPartitionsWithIndex(_work_task(_pack(job), groups)).collect()
        return [pickle.loads(each) for each in found]

    def _passthrough(self, job: Job) -> list[TaskResult]:
        groups = job.groups(self.parallelism)
        packed = _pack(job)
        seeds = self._empty(len(groups))
        lanes = _lanes(job.router.effective)
        if not lanes:
            return [pickle.loads(each) for each in seeds.mapPartitionsWithIndex(_plain_task(packed, groups)).collect()]
        staged = (
            seeds.mapPartitionsWithIndex(_scatter_task(packed, groups, lanes))
            .repartitionAndSortWithinPartitions(
                sum(route.partitions for route in lanes), partitionFunc=lambda key: key[0]
            )
            .mapPartitionsWithIndex(_gather_task(packed, len(groups)))
        )
        return [pickle.loads(each) for each in staged.collect()]

    def _empty(self, tasks: int) -> Any:
        """So many partitions of nothing, kept: making them anew takes 7 ms of every epoch."""
        if tasks not in self._seeds:
            self._seeds[tasks] = self._context.parallelize([], tasks)
        return self._seeds[tasks]

    def _sql(self, job: Job, target: Target, schema: pa.Schema) -> list[TaskResult]:
        from pyspark.sql.pandas.types import to_arrow_schema

        groups = job.groups(self.parallelism)
        packed = _pack(job)
        tallies = self._context.accumulator({}, _tally_param())
        session = _clone(self.session)

        known = frozenset(schema.names)
        fates = _fates(job, target, schema)

        def transformed(schema: pa.Schema) -> Any:
            seeds = session.range(0, len(groups), 1, len(groups))
            task = _read_task(packed, groups, target, schema, known, tallies, fates)
            rows = seeds.mapInArrow(task, _spark_schema(schema, target.topic))
            return _transformed(session, target.route, target.topic, rows)

        frame = transformed(schema)
        if fates is not None:
            fates.computed_on = _computed_on(frame, known)
            frame = transformed(schema)  # once more: its tasks carry what has just been learnt
        if target.route.sql is not None:
            frame = _pruned(frame, schema, transformed)
        key = [column for column in key_of(schema) if column in frame.columns]
        columns = with_key(to_arrow_schema(frame.schema, timezone="UTC"), key)
        written = frame.mapInArrow(_write_task(packed, target, columns, fates), _RESULT).collect()
        results = [pickle.loads(row.result) for row in written]
        results.append(TaskResult(tallies=dict(tallies.value)))
        return results


# -- what runs in tasks --------------------------------------------------------------------------------------------


def _pack(value: Any) -> bytes:
    """Pickle with what a notebook or a script defines itself, which no worker could import."""
    from pyspark import cloudpickle

    return cloudpickle.dumps(value)  # type: ignore[no-any-return]


def _attempt() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return int(context.attemptNumber()) if context else 0


@cache
def _freeze() -> None:
    """Have the worker's collector of garbage, which runs behind each task, pass over what was there before the first one."""
    gc.freeze()


def _plain_task(packed: bytes, groups: list[list[Part]]) -> Callable[[int, Iterable[int]], Iterator[bytes]]:
    def task(index: int, nothing: Iterable[int]) -> Iterator[bytes]:
        list(nothing)  # a worker whose input is not read to its end is thrown away
        _freeze()
        yield _pack(run_task(pickle.loads(packed), groups[index], Task(index, _attempt())))

    return task


def _work_task(packed: bytes, groups: list[list[int]]) -> Callable[[int, Iterable[int]], Iterator[bytes]]:
    def task(index: int, nothing: Iterable[int]) -> Iterator[bytes]:
        list(nothing)
        _freeze()
        yield _pack(run_work(pickle.loads(packed), groups[index], Task(index, _attempt())))

    return task


Key = tuple[int, int, int]


def _lanes(routes: Sequence[Route]) -> dict[Route, int]:
    """The passthrough routes that hash their rows by key, each with the number of its first ordered split."""
    lanes: dict[Route, int] = {}
    for route in routes:
        if is_plain(route) and route.partitions > 1 and route not in lanes:
            lanes[route] = sum(each.partitions for each in lanes)
    return lanes


def _scatter_task(
    packed: bytes, groups: list[list[Part]], lanes: dict[Route, int]
) -> Callable[[int, Iterable[int]], Iterator[tuple[Key, bytes]]]:
    """Read a group; write what needs no order across tasks, and send the rest to its lane as opaque Arrow bytes."""

    def task(index: int, nothing: Iterable[int]) -> Iterator[tuple[Key, bytes]]:
        list(nothing)  # a worker whose input is not read to its end is thrown away
        job: Job = pickle.loads(packed)
        tallies: dict[int, Tally] = {}
        writer = Writer(job, Task(index, _attempt()))
        try:
            sequence = 0
            for tally, target, batch in read_parts(job, groups[index], tallies, lambda target: is_plain(target.route)):
                if target.route not in lanes:
                    write(writer, target, batch, tally, job)
                    continue
                count = target.route.partitions
                key = target.route.key_columns(batch.schema)
                split: list[pa.RecordBatch | None] = []
                with leaving_out(tally, job):
                    split = split_by(batch, partition_of(batch, key, count), count)
                for lane, rows in enumerate(split):
                    if rows is not None and rows.num_rows:
                        sequence += 1
                        yield (
                            (lanes[target.route] + lane, index, sequence),
                            pickle.dumps((target, tally.source, tally.stream, _to_ipc(rows))),
                        )
            result = writer.finish()
        finally:
            writer.close()
        result.tallies = tallies
        yield (0, -1, index), _pack(result)

    return task


def _gather_task(packed: bytes, offset: int) -> Callable[[int, Iterable[tuple[Key, bytes]]], Iterator[bytes]]:
    """Write one lane, in the order of the source; results of the readers pass through."""

    def task(index: int, items: Iterable[tuple[Key, bytes]]) -> Iterator[bytes]:
        job: Job = pickle.loads(packed)
        writer = Writer(job, Task(offset + index, _attempt()))
        told: dict[str, Tally] = {}
        try:
            for (_, group, _), blob in items:
                if group < 0:
                    yield blob
                    continue
                target, source, stream, rows = pickle.loads(blob)
                tally = told.setdefault(source, Tally(source))
                tally.stream = stream
                for batch in pa.ipc.open_stream(rows):
                    if stream not in tally.refused:
                        write(writer, target, batch, tally, job)
            result = writer.finish()
        finally:
            writer.close()
        result.refused = {
            (source, each): note for source, tally in told.items() for each, note in tally.refused.items()
        }
        yield _pack(result)

    return task


def _read_task(
    packed: bytes,
    groups: list[list[Part]],
    wanted: Target,
    schema: pa.Schema,
    known: frozenset[str],
    tallies: Any,
    fates: FilteredChanges | None,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def task(ids: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        job: Job = pickle.loads(packed)
        columns = frozenset(schema.names) if len(schema) < len(known) else None
        if fates is not None and columns is not None:
            columns |= fates.columns(known)
        with fates.noting(_side_file(job)) if fates else contextlib.nullcontext(lambda rows: None) as note:
            for batch in ids:
                for index in batch.column(0).to_pylist():
                    found: dict[int, Tally] = {}
                    for _, _, rows in read_parts(
                        job, groups[index], found, lambda target: _same(target, wanted), columns
                    ):
                        note(rows)  # before the rows go on: who has seen the last of them finds all notes
                        yield _conform(rows, schema, known, wanted.topic)
                    tallies.add(found)

    return task


def _same(target: Target, wanted: Target) -> bool:
    return target.topic == wanted.topic and target.route == wanted.route


def _side_file(job: Job) -> Path:
    """Where the two Python processes of one task meet: Spark removes the directory with itself."""
    from pyspark import TaskContext

    directory = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or tempfile.gettempdir()
    return Path(directory) / f"penstock-{job.epoch.stem()}-{TaskContext.get().taskAttemptId()}.arrow"


def _write_task(
    packed: bytes, target: Target, columns: pa.Schema, fates: FilteredChanges | None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        job: Job = pickle.loads(packed)
        writer = Writer(job, Task(TaskContext.get().partitionId(), _attempt()))
        came_out: list[pa.Table] = []
        try:
            for batch in batches:
                rows = batch.replace_schema_metadata(columns.metadata)
                writer.write(target, rows)
                if fates is not None:
                    came_out.append(fates.came_out(rows))
            if fates is not None:
                for rows in fates.gone(_side_file(job), came_out, columns):
                    writer.write(replace(target, sinks=fates.sinks), rows.replace_schema_metadata(columns.metadata))
            result = writer.finish()
        finally:
            writer.close()
        yield pa.RecordBatch.from_arrays([pa.array([_pack(result)], pa.binary())], names=["result"])

    return task


def _conform(batch: pa.RecordBatch, schema: pa.Schema, known: frozenset[str], topic: Topic) -> pa.RecordBatch:
    """The batch with exactly the columns that the epoch's SQL uses; a column that its analysis did not know is refused."""
    unknown = [name for name in batch.schema.names if name not in known]
    if unknown:
        raise SchemaError(
            f"rows of {topic} have columns that its schema does not know: {', '.join(unknown)}",
            hint="the source must report every column in schema() before it hands over rows with it",
        )
    columns = []
    for column in schema:
        index = batch.schema.get_field_index(column.name)
        if index < 0:
            columns.append(pa.nulls(batch.num_rows, column.type))
            continue
        try:
            columns.append(batch.column(index).cast(column.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaError(
                f"column {column.name} of {topic} holds {batch.schema.field(index).type}, not {column.type}: {error}",
                code="PEN-4001",
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _to_ipc(batch: pa.RecordBatch) -> bytes:
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_stream(buffer, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(buffer.getvalue())


# -- what runs on the driver ---------------------------------------------------------------------------------------


def _session(master: str | None, name: str, log: Path | None, plain: bool = False) -> Any:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if master is None and "--master" not in os.environ.get("PYSPARK_SUBMIT_ARGS", ""):
        master = "local[*]"
    if master is not None and master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    settings = {
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
        # A task answers over a Unix socket 40 ms sooner than over loopback TCP, where its small writes wait for an ACK.
        "spark.python.unix.domain.socket.enabled": "true",
        **{f"spark.executorEnv.{name}": value for name, value in _WORKER_MEMORY.items()},
    }
    if master is not None and master.startswith("local["):
        settings["spark.ui.enabled"] = "false"  # a second of the start, for a page that few open on a laptop
        # Arrow checks the bounds of every value that Spark writes into vectors which it has sized itself: a third of the
        # way from rows to Python. On a cluster these options are the operator's.
        settings["spark.driver.extraJavaOptions"] = f"{_ARROW_OPTIONS} {_LIGHT}" if plain else _ARROW_OPTIONS
    if master is not None:
        settings["spark.master"] = master
    settings["spark.app.name"] = name
    builder = SparkSession.builder
    for option, value in settings.items():
        builder = builder.config(option, value)
    try:
        _launch(settings, log)
        session = builder.getOrCreate()
    except Exception as error:
        raise FatalError(
            f"Spark did not start: {_last_line(str(error))}",
            code="PEN-5012",
            hint=f"its log is {log}" if log else "",
        ) from error
    session.sparkContext.setLogLevel("ERROR")
    # They would print the traces of connections that broke because the JVM was killed, which we say in a line.
    logging.getLogger().addFilter(_not_of_py4j)
    session.sparkContext._accumulatorServer.handle_error = lambda *_: None
    return session


def _launch(settings: dict[str, str], log: Path | None) -> None:
    """Start the JVM with a log file for its stderr: its warnings would tear the progress view."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if log is None or SparkContext._gateway is not None:
        return
    with disk_errors():
        log.parent.mkdir(parents=True, exist_ok=True)
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        conf = SparkConf().setAll(list(settings.items()))
        SparkContext._ensure_initialized(gateway=launch_gateway(conf, {"stderr": target}))
    finally:
        os.close(target)


def _not_of_py4j(record: logging.LogRecord) -> bool:
    return f"{os.sep}py4j{os.sep}" not in record.pathname


def _end(session: Any) -> None:
    """End a session; one whose JVM was killed is forgotten, so that the next run in this process can start another."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a JVM that cannot be stopped because it is gone
            session.stop()
    except (Py4JError, ConnectionError):
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = None


def _archive(path: Path, scratch: Path) -> Path:
    """A module file as it is, a package as a zip that Python can import."""
    if path.is_file():
        return path
    archive = scratch / f"{path.name}.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        for file in sorted(path.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                zipped.write(file, file.relative_to(path.parent))
    return archive


def _try_lock(channel: Any) -> Any:
    from py4j.protocol import Py4JJavaError

    try:
        return channel.tryLock()
    except Py4JJavaError:  # OverlappingFileLockException: another pipeline in this JVM holds it
        return None


def _clone(spark: Any) -> Any:
    """A session of our own that sees the caller's views and functions: our view `input` must not replace theirs."""
    from pyspark.sql import SparkSession

    return SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())


def _transformed(session: Any, route: Route, topic: Topic, rows: Any) -> Any:
    from pyspark.errors import PySparkException

    logging.getLogger("SQLQueryContextLogger").setLevel(
        logging.CRITICAL
    )  # it prints the trace of what we say in a line
    try:
        if route.sql is not None:
            _require_query(session, route, topic)
            rows.createOrReplaceTempView("input")
            return session.sql(route.sql)
        return _called(route, topic, rows)
    except PySparkException as error:
        raise ConfigError(
            f"{_name(route, topic)}: {_first_line(error)}",
            code="PEN-1012",
            hint="`input` holds the rows of the topic; `penstock check` shows its columns",
        ) from error


def _require_query(session: Any, route: Route, topic: Topic) -> None:
    """Refuse a statement that does something: it would do so at every look and again with every epoch."""
    catalyst = "org.apache.spark.sql.catalyst.plans.logical"
    commands = [session._jvm.java.lang.Class.forName(f"{catalyst}.{name}") for name in ("Command", "ParsedStatement")]

    def does_something(plan: Any) -> bool:
        children = plan.children()
        return any(kind.isInstance(plan) for kind in commands) or any(
            does_something(children.apply(index)) for index in range(children.size())
        )

    if does_something(session._jsparkSession.sessionState().sqlParser().parsePlan(route.sql)):
        raise ConfigError(
            f"{_name(route, topic)} is a statement, not a query", code="PEN-1012", hint="write a SELECT over `input`"
        )


def _called(route: Route, topic: Topic, rows: Any) -> Any:
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame

    assert route.transform is not None
    module, _, function = route.transform.partition(":")
    try:
        frame = getattr(importlib.import_module(module), function)(rows)
    except PySparkException:
        raise
    except Exception as error:  # somebody else's code may fail in any way, and its user must know which
        raise ConfigError(
            f"{_name(route, topic)}: {route.transform} raised {type(error).__name__}: {error}", code="PEN-1012"
        ) from error
    if not isinstance(frame, DataFrame):
        raise ConfigError(
            f"{_name(route, topic)}: {route.transform} gave back {type(frame).__name__}, not a DataFrame",
            code="PEN-1012",
        )
    return frame


def _pruned(frame: Any, schema: pa.Schema, again: Callable[[pa.Schema], Any]) -> Any:
    """
    The same query over the columns that it uses: Spark cannot prune what Python hands it, and every column that crosses
    into the JVM costs about as much as the query does.
    """
    from pyspark.errors import PySparkException

    used = _used_columns(frame._jdf.queryExecution().optimizedPlan())
    kept = [column for column in schema if column.name in used] or list(schema)[:1]  # one column, to count rows by
    if len(kept) == len(schema):
        return frame
    try:
        pruned = again(pa.schema(kept, metadata=schema.metadata))
    except (PySparkException, ConfigError):
        return frame  # it names a column only to leave it out
    return pruned if pruned.schema == frame.schema else frame


def _used_columns(plan: Any) -> set[str]:
    """The columns of the input that anything above it refers to."""
    inputs: dict[int, str] = {}
    used: set[int] = set(_ids(plan.output()))

    def walk(node: Any) -> None:
        if str(node.nodeName()) == "MapInArrow":
            inputs.update(_ids(node.output()))
            return
        used.update(_ids(node.references().toSeq()))
        for children in (node.children(), node.subqueries()):
            for index in range(children.size()):
                walk(children.apply(index))

    walk(plan)
    return {name for number, name in inputs.items() if number in used}


def _computed(frame: Any) -> set[str]:
    """The columns of the result that are not columns of the input."""
    plan = frame._jdf.queryExecution().analyzed()
    inputs: set[int] = set()

    def walk(node: Any) -> None:
        children = node.children()
        if not children.size():
            inputs.update(_ids(node.output()))
        for index in range(children.size()):
            walk(children.apply(index))

    walk(plan)
    return {name for number, name in _ids(plan.output()).items() if number not in inputs}


def _fates(job: Job, target: Target, schema: pa.Schema) -> FilteredChanges | None:
    """For changes on their way to sinks that apply them by key."""
    keyed = tuple(name for name in target.sinks if name in job.sinks and job.sinks[name].capabilities.upsert)
    if not keyed or not is_changelog(schema):
        return None
    key = getattr(job.sinks[keyed[0]].config, "key", ()) or key_of(schema)
    return FilteredChanges(list(key), keyed)


def _computed_on(frame: Any, known: frozenset[str]) -> frozenset[str]:
    """The columns of the input that the query does not just hand on under their own name, with what tells of them."""
    if "_unchanged" not in frame.columns:
        return known
    inputs: dict[int, str] = {}
    used: set[int] = set()

    def walk(node: Any) -> None:
        if str(node.nodeName()) == "MapInArrow":
            inputs.update(_ids(node.output()))
            return
        expressions = node.expressions()
        for each in (expressions.apply(index) for index in range(expressions.size())):
            if str(node.nodeName()) == "Filter" or str(each.nodeName()) != "AttributeReference":
                used.update(_ids(each.references().toSeq()))
        children = node.children()
        for index in range(children.size()):
            walk(children.apply(index))

    walk(frame._jdf.queryExecution().analyzed())
    return frozenset(name for number, name in inputs.items() if number in used)


def _ids(attributes: Any) -> dict[int, str]:
    found = (attributes.apply(index) for index in range(attributes.size()))
    return {int(attribute.exprId().id()): str(attribute.name()) for attribute in found}


def _name(route: Route, topic: Topic) -> str:
    return f"the {'SQL' if route.sql is not None else 'transform'} of the route from {route.stream!r} to {topic!r}"


def _nodes(plan: Any) -> Iterator[str]:
    yield str(plan.nodeName())
    children = plan.children()
    for index in range(children.size()):
        yield from _nodes(children.apply(index))
    subqueries = plan.subqueries()
    for index in range(subqueries.size()):
        yield from _nodes(subqueries.apply(index))


def _spark_schema(schema: pa.Schema, topic: Topic) -> Any:
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_schema

    try:
        return from_arrow_schema(schema)
    except PySparkException as error:
        raise SchemaError(f"SQL cannot take the rows of {topic}: {_last_line(str(error))}") from error


def _sql_targets(job: Job) -> dict[Target, list[pa.Schema]]:
    """Each topic that SQL makes, with the schemas of all streams that feed it."""
    schemas: dict[Target, list[pa.Schema]] = {}
    for source, streams in job.schemas.items():
        for stream, schema in streams.items():
            for target in job.router.targets(source, stream):
                if not is_plain(target.route) and any(job.wants(sink, target.topic) for sink in target.sinks):
                    schemas.setdefault(target, []).append(schema)
    return schemas


def _without(job: Job, target: Target, error: ConnectorError) -> TaskResult:
    """Leave out the streams that feed a topic which SQL could not make, if their sources can begin them anew; else raise."""
    result = TaskResult(attempt=1)  # what its tasks have staged is to be swept
    for source, streams in job.schemas.items():
        for stream in streams:
            if target in job.router.targets(source, stream):
                if not isinstance(job.sources[source], TableSource):
                    raise error
                result.refused[source, stream] = Refused.because(stream, error).note()
    return result


def merged(schemas: Sequence[pa.Schema], topic: Topic) -> pa.Schema:
    """One schema for streams that meet in a topic."""
    try:
        return pa.unify_schemas(list(schemas), promote_options="permissive").with_metadata(schemas[0].metadata)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise SchemaError(f"the streams that meet in {topic} do not fit together: {error}") from error


def _tally_param() -> Any:
    from pyspark.accumulators import AccumulatorParam

    class Tallies(AccumulatorParam[dict[int, Tally]]):  # type: ignore[misc]
        def zero(self, value: dict[int, Tally]) -> dict[int, Tally]:
            return {}

        def addInPlace(self, value1: dict[int, Tally], value2: dict[int, Tally]) -> dict[int, Tally]:
            value1.update(value2)  # by part, so a task that ran twice counts once
            return value1

    return Tallies()


@contextlib.contextmanager
def _driver_errors() -> Iterator[None]:
    """Give a worker's exception, which reaches the driver as text, its class back."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException, ConnectionError) as error:
        if _is_gone(error):
            raise FatalError(
                "the JVM that runs Spark is gone",
                code="PEN-5014",
                hint="start again, nothing is lost; if it happens again: did memory run out, and what does Spark's log say?",
            ) from error
        text = str(error)
        known = from_text(text)
        if known is not None:
            raise known from error
        if any(sign in text for sign in ("exited unexpectedly", "ExecutorLostFailure", "Connection reset", "crashed")):
            raise RetryableError(f"Spark lost a task: {_last_line(text)}", code="PEN-2006") from error
        raise FatalError(_last_line(text), code="PEN-5012", hint="the whole trace is in Spark's log") from error


@contextlib.contextmanager
def _row_errors(target: Target) -> Iterator[None]:
    """Name the route whose SQL a row made fail; what a worker raised says by itself where it comes from."""
    from pyspark.errors import PySparkException, PythonException

    try:
        yield
    except PySparkException as error:
        if isinstance(error, PythonException) or not error.getCondition() or from_text(str(error)):
            raise
        raise DataError(
            f"{_name(target.route, target.topic)} failed on a row: {_first_line(error)}",
            code="PEN-3003",
            hint="filter such rows out in the SQL, or use try_cast, try_divide and the like",
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _is_gone(error: Exception) -> bool:
    """Whether the JVM did not answer; an answer that tells of an error has a trace."""
    from py4j.protocol import Py4JError, Py4JNetworkError

    return isinstance(error, Py4JNetworkError | ConnectionError) or (
        type(error) is Py4JError and "Trace:" not in str(error)
    )


def _last_line(text: str) -> str:
    """The line of a trace that says what happened."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    return (errors or lines or [text])[-1][:500]


# -- Spark's own readers over range sources ------------------------------------------------------------------------


def register(spark: Any) -> None:
    """
    Make `spark.read.format("penstock")` and `spark.readStream.format("penstock")` read range sources.

    `option("connector", "files")` names the source and every other option is one of its own; what is not text there is
    written as JSON. `option("stream", …)` chooses among several streams.
    """
    from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
    from pyspark.sql.streaming.datasource import ReadLimit as SparkLimit
    from pyspark.sql.streaming.datasource import ReadMaxRows

    class Ranges:
        """What the batch and the streaming reader share; opened where it is used, since a connection does not travel."""

        def __init__(self, source: RangeSource[Any, Any], stream: str, schema: pa.Schema) -> None:
            self._source, self._stream, self._schema = source, stream, schema

        def position(self, value: dict[str, Any]) -> Any:
            return self._source.position_type.model_validate(json.loads(value["position"]))

        def offset(self, position: Any) -> dict[str, Any]:
            return {"position": canonical(position.model_dump(mode="json"))}  # offsets of Spark hold no lists

        def splits(self, start: Any, end: Any) -> list[InputPartition]:
            return [InputPartition(split) for split in self._source.split(start, end)] if start != end else []

        def rows(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            with opened(self._source):
                for item in self._source.read(partition.value):
                    if isinstance(item, SourceBatch) and item.stream == self._stream:
                        yield _conform(item.records, self._schema, frozenset(self._schema.names), self._stream)

    class BatchReader(Ranges, DataSourceReader):  # type: ignore[misc]
        def partitions(self) -> list[InputPartition]:
            with opened(self._source):
                start = self._source.initial()
                return self.splits(start, self._source.latest(start, ReadLimit(parallelism=os.cpu_count() or 1)))

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            return self.rows(partition)

    class StreamReader(Ranges, DataSourceStreamReader):  # type: ignore[misc]
        def initialOffset(self) -> dict[str, Any]:
            self._source.open()
            return self.offset(self._source.initial())

        def latestOffset(self, start: dict[str, Any], limit: SparkLimit) -> dict[str, Any]:
            rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
            bound = ReadLimit(rows=rows, parallelism=os.cpu_count() or 1)
            return self.offset(self._source.latest(self.position(start), bound))

        def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
            return self.splits(self.position(start), self.position(end))

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            return self.rows(partition)

        def commit(self, end: dict[str, Any]) -> None:
            self._source.ack(self.position(end))

        def stop(self) -> None:
            self._source.close()

    class PenstockDataSource(DataSource):  # type: ignore[misc]
        @classmethod
        def name(cls) -> str:
            return "penstock"

        def _made(self) -> tuple[RangeSource[Any, Any], str, pa.Schema]:
            return _range_source(dict(self.options))

        def schema(self) -> Any:
            _, stream, schema = self._made()
            return _spark_schema(schema, stream)

        def reader(self, schema: Any) -> DataSourceReader:
            return BatchReader(*self._made())

        def streamReader(self, schema: Any) -> DataSourceStreamReader:
            return StreamReader(*self._made())

    spark.dataSource.register(PenstockDataSource)


@contextlib.contextmanager
def opened(source: RangeSource[Any, Any]) -> Iterator[None]:
    source.open()
    try:
        yield
    finally:
        source.close()


def _range_source(options: dict[str, str]) -> tuple[RangeSource[Any, Any], str, pa.Schema]:
    from penstock.pipeline.registry import source_type

    connector = options.pop("connector", None)
    if connector is None:
        raise ConfigError('format("penstock") needs option("connector", …)', code="PEN-1004")
    kind = source_type(connector)
    if not issubclass(kind, RangeSource):
        raise ConfigError(f"{connector} is not a range source; run it in a pipeline", code="PEN-1009")
    if issubclass(kind, TableSource):
        raise ConfigError(
            f"{connector} takes notes while it copies tables, and Spark's own readers keep none",
            code="PEN-1009",
            hint="run it in a pipeline: Pipeline.from_toml(…).run(spark=spark)",
        )
    stream = options.pop("stream", None) if "stream" not in kind.config_type.model_fields else None
    by_lower = {name.lower(): name for name in kind.config_type.model_fields}  # Spark forgets the case of options
    settings = {by_lower.get(name.lower(), name): _option(value) for name, value in options.items()}
    source = kind(kind.config_type.model_validate(settings))
    with opened(source):
        schemas = source.schema()
    stream = stream or next(iter(schemas), "")
    if stream not in schemas:
        raise ConfigError(f"{connector} has no stream {stream!r}; there are {', '.join(schemas)}", code="PEN-1003")
    return source, stream, schemas[stream]


def _option(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
