"""Runs each epoch as a Spark job."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

import penstock
from penstock.durable import disk_errors
from penstock.errors import (
    ConfigError,
    ConnectorError,
    DataError,
    FatalError,
    is_of_stream,
)
from penstock.pipeline import Pipeline
from penstock.pipeline.routing import Target
from penstock.runtime.job import (
    ApplyJob,
    ApplyResult,
    Job,
    TaskResult,
    is_plain,
)
from penstock.runtime.journal import UNSEEN
from penstock.runtime.messages.letters import REPLAY, Place
from penstock.schema import key_of, with_key
from penstock.spark.failures import driver_errors
from penstock.spark.java import java_problem
from penstock.spark.probe import Needs, probe
from penstock.spark.session import (
    JVM_LOCK_WAIT_SECS,
    end_session,
    expected_cores,
    is_local,
    start_session,
    try_lock,
)
from penstock.spark.shipping import bare, carrying, ship
from penstock.spark.sieve import CODE, TRIES, Sieve, find, keeps_rows
from penstock.spark.sql import (
    BAD_SQL,
    activate,
    check_route,
    clone,
    computed_on,
    filtered_changes,
    findable,
    for_jvm,
    merged,
    pruned,
    row_errors,
    spark_schema,
    sql_targets,
    transform,
)
from penstock.spark.streaming import Kept, Streamed
from penstock.spark.tasks import (
    Wanted,
    count_task,
    evaluate_task,
    gather_task,
    lanes_of,
    pack,
    plain_task,
    read_task,
    result_param,
    scatter_task,
    seeded_task,
    work_task,
    write_task,
)
from penstock.spark.versions import arrow_schema
from penstock.tables import Refused, TableSource

_LOG = logging.getLogger("penstock.spark")

_RESULT = "result binary"

_SESSION = threading.Lock()

_users = 0
"""Engines that use the session which the first of them started; the last one ends it. Guarded by `_SESSION`."""


def engine_for(pipeline: Pipeline, spark: Any = None, *, master: str | None = None, alone: bool = False) -> SparkEngine:
    """The engine that runs a pipeline, in the caller's session if given. `alone`: this process runs nothing else."""
    log = pipeline.processing.state_dir / "spark.log"
    plain = alone and all(is_plain(route) for route in pipeline.router.effective)
    needs = Needs.of(pipeline)
    ships = pipeline.third_party
    return SparkEngine(spark, master=master, name=pipeline.name, log=log, ship=ships, plain=plain, needs=needs)


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
        needs: Needs | None = None,
    ) -> None:
        """
        `plain`: no rows will ever enter the JVM, which nobody else uses, so it need not be ready to work on them.

        `needs`: what tasks need on the machines of a cluster; None: nobody looks for it before the first epoch.
        """
        self.session = spark
        self._given = spark is not None
        self._shared = False
        self.master = master
        self._name = name
        self._log = log
        self._ship = ship
        self._plain = plain
        self._needs = needs
        self._jvm_lock: Any = None
        self._seeds: dict[int, Any] = {}
        self._carries = False  # journals are not where the tasks are: their rows travel with the job

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
        elsewhere = not self.is_local
        ship(self._context, (*((Path(penstock.__file__).parent,) if elsewhere else ()), *self._ship))
        if elsewhere and self._needs is not None:
            with self._described("probe", "what do the executors have?"):
                probe(self._context, self._needs, self.parallelism)

    @property
    def is_local(self) -> bool:
        return is_local(str(self._context.master))

    def _join(self) -> None:
        """Start a session, or share the one that this process has: there can be only one."""
        global _users
        from pyspark import SparkContext

        with _SESSION:
            strangers = SparkContext._active_spark_context is not None and not _users
            self.session = start_session(self.master, self._name, self._log, self._plain)
            if not strangers:
                self._shared = True
                _users += 1

    def hold(self, lock: Path) -> None:
        """Hold a lock inside the driver's JVM, which outlives a killed Python by seconds; waits for an older JVM to end."""
        with disk_errors(lock):
            lock.touch(0o600)  # the JVM would let others read it
        channel = self.session._jvm.java.io.RandomAccessFile(str(lock.absolute()), "rw").getChannel()
        give_up = time.monotonic() + JVM_LOCK_WAIT_SECS
        while (held := try_lock(channel)) is None:
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
                    end_session(self.session)
        if not self._given:
            self.session = None

    @contextlib.contextmanager
    def _described(self, group: str, what: str) -> Iterator[None]:
        """For Spark's own pages: what the jobs are for."""
        self._context.setJobGroup(group, what, False)
        yield

    @property
    def parallelism(self) -> int:
        """The tasks that the cluster may run at once. It may have fewer executors yet: waiting tasks are what makes it grow."""
        with driver_errors():
            return max(1, int(self._context.defaultParallelism), expected_cores(self._context))

    @property
    def version(self) -> str:
        return f"Spark {self.session.version} on {self._context.master}"

    def busy(self) -> bool:
        """True while tasks run."""
        try:
            with driver_errors():
                tracker = self._context.statusTracker()
                stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
                return any(stage is not None and stage.numActiveTasks for stage in stages)
        except ConnectorError:  # the job tells it better
            return False

    def check(self, routes: Sequence[tuple[Target, pa.Schema]], keyed: Collection[str] = ()) -> None:
        """Analyse the SQL of each route against its topic's schema; refuse what is wrong or works per epoch unasked."""
        for target, schema in routes:
            if not is_plain(target.route):
                try:
                    check_route(
                        clone(self.session, schema), target, schema, bool(set(target.sinks).intersection(keyed))
                    )
                finally:
                    activate(self.session)

    def run(self, job: Job) -> Sequence[TaskResult]:
        """Stage one epoch. Where tasks cannot see a journal, once more and from then on with its rows in hand."""
        if self._carries:
            with carrying(self._context, job) as loaded:
                return self._run(loaded)
        try:
            return self._run(job)
        except FatalError as error:
            if error.code != UNSEEN:
                raise
        self._carries = True
        with carrying(self._context, job) as loaded:
            return [*self._run(loaded), TaskResult(attempt=1)]  # what the first try has staged is to be swept

    def _run(self, job: Job) -> Sequence[TaskResult]:
        """One Spark job for all passthrough routes, and one for each topic that SQL makes."""
        from py4j.protocol import Py4JError

        routes = job.router.effective
        results: list[TaskResult] = []
        with driver_errors():
            self._context.setJobGroup(job.epoch.pipeline, str(job.epoch), False)
            if job.look or REPLAY in job.sources or any(is_plain(route) for route in routes):
                results += self._passthrough(job)
            for target, schemas in sql_targets(job).items():
                try:
                    schema = merged(schemas, target.topic)
                    streams = target.route.streaming
                    results += self._streamed(job, target, schema) if streams else self._sifted(job, target, schema)
                except ConnectorError as error:
                    if not is_of_stream(error) and error.code != BAD_SQL:
                        raise  # such as of a connector that could not be opened
                    results.append(_without(job, target, error))
                finally:
                    with contextlib.suppress(Py4JError, ConnectionError):  # of a JVM that is gone
                        activate(self.session)
        return results

    def apply(self, job: ApplyJob) -> Sequence[ApplyResult]:
        """Do the work that an epoch's commits need: one more Spark job."""
        groups = job.groups(4 * self.parallelism)
        with driver_errors():
            self._context.setJobGroup(job.epoch.pipeline, f"{job.epoch} · apply", False)
            found = self._empty(len(groups)).mapPartitionsWithIndex(work_task(pack(job), groups)).collect()
        return [pickle.loads(each) for each in found]

    def _passthrough(self, job: Job) -> list[TaskResult]:
        groups = job.groups(self.parallelism)
        packed = pack(bare(job))
        seeds = self._empty(len(groups))
        lanes = lanes_of(job.router.effective)
        if not lanes:
            return [pickle.loads(each) for each in seeds.mapPartitionsWithIndex(plain_task(packed, groups)).collect()]
        staged = (
            seeds.mapPartitionsWithIndex(scatter_task(packed, groups, lanes))
            .repartitionAndSortWithinPartitions(
                sum(route.partitions for route in lanes), partitionFunc=lambda key: key[0]
            )
            .mapPartitionsWithIndex(gather_task(packed, len(groups)))
        )
        return [pickle.loads(each) for each in staged.collect()]

    def _empty(self, tasks: int) -> Any:
        """So many partitions of nothing, kept: to make them again takes 7 ms of every epoch."""
        if tasks not in self._seeds:
            self._seeds[tasks] = self._context.parallelize([], tasks)
        return self._seeds[tasks]

    def _sifted(self, job: Job, target: Target, schema: pa.Schema) -> list[TaskResult]:
        """Run a query; if it fails on rows that may become dead letters, once more without these."""
        origins = feeding(job, target)
        try:
            with driver_errors(), row_errors(target):
                return self._sql(job, target, schema, Sieve())
        except DataError as error:
            if error.code != CODE or not keeps_rows(job, {each.source for each in origins}, target.route):
                raise

            def fails(task: int, low: int, high: int) -> DataError | None:
                try:
                    with driver_errors(), row_errors(target):
                        self._sql(job, target, schema, Sieve(only=(task, low, high)))
                except DataError as why:
                    if why.code != CODE:
                        raise
                    return why
                return None

            _LOG.warning(
                "the query of %s fails on a row: looking for it by halves, in at most %s queries", target.topic, TRIES
            )
            groups = job.groups(self.parallelism)
            counting = self._empty(len(groups)).mapPartitionsWithIndex(count_task(pack(bare(job)), groups, target))
            counts = dict(counting.collect())
            bad = find([counts[index] for index in range(len(groups))], fails, error)
            with driver_errors(), row_errors(target):
                results = self._sql(job, target, schema, Sieve(without=bad))
            return [*results, TaskResult(attempt=1)]  # what the first try has staged is to be swept

    def _sql(self, job: Job, target: Target, schema: pa.Schema, sieve: Sieve) -> list[TaskResult]:
        groups = job.groups(self.parallelism)
        packed = pack(bare(job))
        readers = self._context.accumulator({}, result_param())
        session = clone(self.session, schema)

        known = frozenset(schema.names)
        fates = filtered_changes(job, target, schema)

        def queried(schema: pa.Schema) -> Any:
            seeds = session.range(0, len(groups), 1, len(groups))
            task = read_task(
                packed, groups, Wanted(target, for_jvm(schema, target.topic), known, readers, sieve), fates
            )
            rows = seeds.mapInArrow(task, spark_schema(schema, target.topic))
            return transform(session, target.route, target.topic, rows)

        frame = queried(schema)
        if fates is not None:
            fates.computed_on = computed_on(frame, known)
            frame = queried(schema)  # once more: its tasks carry what has just been learnt
        if target.route.sql is not None:
            frame, _ = pruned(frame, schema, queried)
        key = [column for column in key_of(schema) if column in frame.columns]
        columns = with_key(arrow_schema(frame.schema), key)
        if sieve.probes:
            findable(frame).mapInArrow(evaluate_task, _RESULT).collect()
            return []
        origin = next((each for each in feeding(job, target) if keeps_rows(job, {each.source}, target.route)), None)
        task = write_task(packed, target, columns, fates, origin)
        written = findable(frame).mapInArrow(task, _RESULT).collect()
        results = [pickle.loads(row.result) for row in written]
        results += readers.value.values()
        return results

    def _streamed(self, job: Job, target: Target, schema: pa.Schema) -> list[TaskResult]:
        """Run an epoch through a query that keeps its state."""
        assert self._log is not None, "a streaming route keeps its state beside the pipeline's"
        groups, session = job.groups(self.parallelism), clone(self.session, schema)
        readers = self._context.accumulator({}, result_param())
        known = frozenset(schema.names)

        def queried(schema: pa.Schema, seeds: Any) -> Any:
            wanted = Wanted(target, for_jvm(schema, target.topic), known, readers)
            rows = seeds.mapInArrow(seeded_task(wanted), spark_schema(schema, target.topic))
            return transform(session, target.route, target.topic, rows)

        if target.route.sql is not None:  # Spark plans a stream only as it starts: asked of the same query over a batch
            one = session.range(1).selectExpr("CAST(id AS INT) AS `group`", "CAST(NULL AS BINARY) AS job")
            _, needed = pruned(queried(schema, one), schema, lambda some: queried(some, one))
        else:
            needed = schema

        def write(batch: Any) -> list[TaskResult]:
            columns = arrow_schema(batch.schema)
            task = write_task(pack(job), target, columns, None, None)
            written = findable(batch).mapInArrow(task, _RESULT).collect()
            return [pickle.loads(row.result) for row in written]

        kept = Kept.of(self._log.parent, job.epoch.incarnation, target)
        with driver_errors(), row_errors(target):
            run = Streamed(kept, target, job.epoch.number, partial(queried, needed), write)
            results = run.run(session, pack((job, groups)), len(groups))
        return [*results, *readers.value.values()]


def feeding(job: Job, target: Target) -> list[Place]:
    """The streams that feed a topic."""
    return [
        Place(source, stream, target.topic)
        for source, streams in job.schemas.items()
        for stream in streams
        if target in job.router.targets(source, stream)
    ]


def _without(job: Job, target: Target, error: ConnectorError) -> TaskResult:
    """Leave out the streams that feed a topic which SQL could not make, if their sources can copy them again; else raise."""
    result = TaskResult(attempt=1)  # what its tasks have staged is to be swept
    for source, streams in job.schemas.items():
        for stream in streams:
            if target in job.router.targets(source, stream):
                if not isinstance(job.sources[source], TableSource):
                    raise error
                result.refused[source, stream] = Refused.because(stream, error).note()
    return result
