"""Routes with SQL: their checks, their plans and the columns they use."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import pyarrow as pa

from penstock.changes import is_changelog
from penstock.errors import ConfigError, DataError, SchemaError, from_text, reason_of
from penstock.pipeline.routing import Route, Target
from penstock.runtime.job import (
    Job,
    is_plain,
)
from penstock.schema import key_of
from penstock.sink import Topic
from penstock.spark.deletes import FilteredChanges
from penstock.spark.failures import first_line, last_line
from penstock.spark.versions import arrow_schema

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

BAD_SQL = "PEN-1012"

ROW_BY_ROW = {"Project", "Filter", "SubqueryAlias", "View", "MapInArrow", "LogicalRDD", "LocalRelation", "Range"}
"""Operators that look at each change by itself, so that it is known what becomes of it."""


def clone(spark: Any, schema: pa.Schema) -> Any:
    """
    A session of our own that sees the caller's views and functions: our view `input` must not replace theirs.

    Where the rows have columns whose names differ in case only, names are what they are written as: one message with `ID`
    beside all those with `id` would make every query of the topic ambiguous, for ever.
    """
    from pyspark.sql import SparkSession

    session = SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())
    if has_twins(schema):
        session.conf.set("spark.sql.caseSensitive", "true")
    return session


def has_twins(fields: pa.Schema | pa.DataType) -> bool:
    """True if names of columns, or of fields in one of them, differ in case only."""
    if isinstance(fields, pa.DataType):
        if not pa.types.is_struct(fields):
            return any(has_twins(fields.field(at).type) for at in range(fields.num_fields))
        fields = pa.schema(list(fields))
    names = {name.lower() for name in fields.names}
    return len(names) < len(fields.names) or any(has_twins(field.type) for field in fields)


def activate(spark: Any) -> None:
    """Make a session the active one again: what we ask of a clone makes the clone active, and its caller would be lost."""
    from pyspark.sql import SparkSession

    SparkSession._activeSession = spark
    SparkSession._get_j_spark_session_class(spark._jvm).setActiveSession(spark._jsparkSession)


def check_route(session: Any, target: Target, schema: pa.Schema, keyed: bool) -> None:
    """Refuse a query that is wrong, works per epoch unasked, or drops what changes need; `keyed`: a sink applies them by key."""
    route, topic = target.route, target.topic
    frame = transform(session, route, topic, session.createDataFrame([], spark_schema(schema, topic)))
    plan = frame._jdf.queryExecution().analyzed()
    if route.sql is not None and "View (`input`" not in str(plan.toString()):
        _refuse(target, "does not read `input`, so the rows of the topic would go nowhere", "select FROM input")
    operators = set(_operators(plan))
    if route.streaming:
        _check_streaming(session, target, schema)
        return
    if operators & PER_EPOCH and not route.per_epoch:
        raise ConfigError(
            f"{route_name(route, topic)} uses {_listed(operators & PER_EPOCH)}, which would see one epoch at a time",
            code="PEN-1017",
            hint="set `streaming = true` on the route to keep state across epochs, or `per_epoch = true` if that is meant",
        )
    twice = {column for column in frame.columns if frame.columns.count(column) > 1}
    if twice:
        _refuse(target, f"makes two columns named {_listed(twice)}", "give one of them another name with AS")
    if "_op" in schema.names:
        _check_changes(frame, target, schema, operators - ROW_BY_ROW if keyed else set())


def _check_streaming(session: Any, target: Target, schema: pa.Schema) -> None:
    """Refuse what Structured Streaming cannot do, before the first epoch."""
    from pyspark.errors import PySparkException

    route, topic = target.route, target.topic
    seeds = session.readStream.format("rate").load()
    rows = seeds.mapInArrow(lambda batches: batches, spark_schema(schema, topic))
    frame = transform(session, route, topic, rows)
    if not frame.isStreaming:
        _refuse(
            target, "does not read the rows of the topic as a stream", "hand on what was made of the frame it was given"
        )
    modes = session._jvm.org.apache.spark.sql.streaming.OutputMode
    mode = modes.Update() if route.output_mode == "update" else modes.Append()
    checker = session._jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    try:
        checker.checkForStreaming(frame._jdf.queryExecution().analyzed(), mode)
    except PySparkException as error:
        _refuse(target, f"cannot be a streaming query: {first_line(error)}", "see docs/spark.md, State across epochs")


def _check_changes(frame: Any, target: Target, schema: pa.Schema, mixing: set[str]) -> None:
    """Refuse a query over changes whose result could not be applied."""
    needed = (*key_of(schema), "_op", "_position")
    lost = [column for column in needed if column not in frame.columns]
    if lost:
        what = f"drops {', '.join(lost)}, without which a change cannot be applied"
        _refuse(target, what, f"select {', '.join(lost)} as well")
    computed = _computed(frame)
    changed = [column for column in needed if column in computed]
    if changed:
        what = f"changes {', '.join(changed)}, by which a change finds its row"
        _refuse(target, what, "select it as it is, and give what is computed from it another name")
    if mixing:
        what = (
            f"uses {_listed(mixing)}, and the sink applies its rows by key: of a change that is mixed with others "
            "nobody can tell what it leaves of its row"
        )
        _refuse(target, what, 'only select and filter there, or write to a sink with mode = "changes"')


def _refuse(target: Target, what: str, hint: str) -> NoReturn:
    raise ConfigError(f"{route_name(target.route, target.topic)} {what}", code=BAD_SQL, hint=hint)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def transform(session: Any, route: Route, topic: Topic, rows: Any) -> Any:
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
            f"{route_name(route, topic)}: {first_line(error)}",
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
            f"{route_name(route, topic)} is a statement, not a query",
            code="PEN-1012",
            hint="write a SELECT over `input`",
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
            f"{route_name(route, topic)}: {route.transform} raised {type(error).__name__}: {error}", code="PEN-1012"
        ) from error
    if not isinstance(frame, DataFrame):
        raise ConfigError(
            f"{route_name(route, topic)}: {route.transform} gave back {type(frame).__name__}, not a DataFrame",
            code="PEN-1012",
        )
    return frame


def pruned(frame: Any, schema: pa.Schema, again: Callable[[pa.Schema], Any]) -> tuple[Any, pa.Schema]:
    """
    The same query over the columns that it uses, and these: Spark cannot prune what Python hands it, and every column that
    crosses into the JVM costs about as much as the query does.
    """
    from pyspark.errors import PySparkException

    used = _used_columns(frame._jdf.queryExecution().optimizedPlan())
    kept = [column for column in schema if column.name in used] or list(schema)[:1]  # one column, to count rows by
    if len(kept) == len(schema):
        return frame, schema
    narrow = pa.schema(kept, metadata=schema.metadata)
    try:
        pruned = again(narrow)
    except (PySparkException, ConfigError):
        return frame, schema  # it names a column only to leave it out
    return (pruned, narrow) if pruned.schema == frame.schema else (frame, schema)


def findable(frame: Any) -> Any:
    """The frame with numbers for names, if Spark could not find each column by its own: `a.b` would be a field of `a`."""
    names: list[str] = frame.columns
    is_plain = not any(set(".`") & set(name) for name in names) and len({name.lower() for name in names}) == len(names)
    return frame if is_plain else frame.toDF(*(f"column{number}" for number in range(len(names))))


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


def filtered_changes(job: Job, target: Target, schema: pa.Schema) -> FilteredChanges | None:
    """For changes on their way to sinks that apply them by key."""
    keyed = tuple(name for name in target.sinks if name in job.sinks and job.sinks[name].capabilities.upsert)
    if not keyed or not is_changelog(schema):
        return None
    key = getattr(job.sinks[keyed[0]].config, "key", ()) or key_of(schema)
    return FilteredChanges(list(key), keyed)


def computed_on(frame: Any, known: frozenset[str]) -> frozenset[str]:
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


def route_name(route: Route, topic: Topic) -> str:
    return f"the {'SQL' if route.sql is not None else 'transform'} of the route from {route.stream!r} to {topic!r}"


def _operators(plan: Any) -> Iterator[str]:
    yield str(plan.nodeName())
    children = plan.children()
    for index in range(children.size()):
        yield from _operators(children.apply(index))
    subqueries = plan.subqueries()
    for index in range(subqueries.size()):
        yield from _operators(subqueries.apply(index))


def spark_schema(schema: pa.Schema, topic: Topic) -> Any:
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_schema

    try:
        return from_arrow_schema(schema)
    except PySparkException as error:
        raise SchemaError(f"SQL cannot take the rows of {topic}: {last_line(str(error))}") from error


def for_jvm(schema: pa.Schema, topic: Topic) -> pa.Schema:
    """The same columns in the types that the JVM reads: of times, it knows only those in microseconds."""
    return arrow_schema(spark_schema(schema, topic))


def sql_targets(job: Job) -> dict[Target, list[pa.Schema]]:
    """Each topic that SQL makes, with the schemas of all streams that feed it."""
    schemas: dict[Target, list[pa.Schema]] = {}
    for source, streams in job.schemas.items():
        for stream, schema in streams.items():
            for target in job.router.targets(source, stream):
                decoded = job.decoders.schema(target.topic, schema)
                wanted = any(job.wants(sink, target.topic) for sink in target.sinks)
                if not is_plain(target.route) and wanted and decoded is not None:
                    schemas.setdefault(target, []).append(decoded)
    return schemas


def merged(schemas: Sequence[pa.Schema], topic: Topic) -> pa.Schema:
    """One schema for streams that meet in a topic."""
    try:
        return pa.unify_schemas(list(schemas), promote_options="permissive").with_metadata(schemas[0].metadata)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise SchemaError(f"the streams that meet in {topic} do not fit together: {error}") from error


@contextlib.contextmanager
def row_errors(target: Target) -> Iterator[None]:
    """Name the route whose SQL a row made fail; what a worker raised says by itself where it comes from."""
    from pyspark.errors import PySparkException, PythonException

    try:
        yield
    except PySparkException as error:
        if isinstance(error, PythonException) or not error.getCondition() or from_text(str(error)):
            raise
        raise DataError(
            f"{route_name(target.route, target.topic)} failed on a row: {reason_of(error)}",
            code="PEN-3003",
            hint="filter such rows out in the SQL, or use try_cast, try_divide and the like",
        ) from error
