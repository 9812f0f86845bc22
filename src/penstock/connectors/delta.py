"""Append topics to Delta tables, each epoch exactly once."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, DeltaProtocolError, TableNotFoundError
from deltalake.transaction import AddAction
from pyarrow import types
from pydantic import Field, PositiveInt

from penstock import durable, failpoints
from penstock.config import Config, Secret
from penstock.connectors import staging
from penstock.connectors.staging import HIDDEN, StagedFile, StagedFiles, Targets, unpack_schema
from penstock.errors import ConfigError, DataError, FatalError, RetryableError, SchemaError, StagingLost
from penstock.schema import ChangeKind, SchemaChange
from penstock.schema.evolution import diff, follow
from penstock.sink import (
    CommittedEpoch,
    Epoch,
    Positions,
    SinkConnectorCapabilities,
    Task,
    Topic,
    TopicSink,
    WriteResult,
    is_committed,
)

TRIES = 20
"""Commits of other writers that one commit gives way to before it fails for a while."""

STATS_COLUMNS = 32
"""Columns with statistics in the log, as Delta's own default is."""


class DeltaConfig(Config):
    path: str
    """Directory of a topic's table, e.g. `lake/{topic}`, where `{topic}` is the topic without its leading slash."""

    mode: str = "append"
    """How rows are applied; only `append` yet."""

    partition_by: tuple[str, ...] = ()
    """Partition columns of tables that are created; an existing table must have the same."""

    compression: Literal["zstd", "snappy", "gzip", "none"] = "zstd"
    """Compression of the Parquet files."""

    target_file_rows: PositiveInt = 5_000_000
    """About how many rows a file holds at most; an epoch always begins new files."""

    max_open_files: PositiveInt = 64
    """How many partitions a task writes at once; rows of one more end the file that had none for longest."""

    storage_options: dict[str, str | Secret] = Field(default_factory=dict)
    """Options of an object store; not yet, since only local directories can be written."""


class Sidecar(CommittedEpoch):
    """The marker beside the log, which has no room for `end`; the log's transactions say which sidecar counts."""

    version: int
    """Version of the table that this commit makes."""


class Delta(TopicSink[DeltaConfig, StagedFiles]):
    """
    Tasks write Parquet files into the table's directory; the driver commits them in one entry of the table's log,
    together with two application transactions: which epoch of this incarnation it is, and a number that grows with
    every commit of the pipeline and names the sidecar (`_penstock/<pipeline>`) that holds the end.

    Supports exactly-once: an entry is made only at the version after the one whose marker was looked at. Readers see
    whole epochs. Other writers may append to, compact and vacuum the table meanwhile.
    """

    name = "delta"
    capabilities = (
        SinkConnectorCapabilities()
        .with_exactly_once()
        .with_two_phase_commit()
        .with_schema_evolution()
        .with_partitioned()
    )

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__(config)
        self._path = os.path.abspath(config.path)  # here, since executors may stand in another directory
        self.__setstate__(self.__getstate__())

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stage: staging.Stage | None = None
        self._required: dict[Topic, list[str]] = {}
        self._tables: dict[Topic, _Table] = {}
        self._committed: set[Topic] = set()

    def open(self) -> None:
        if self.config.mode != "append":
            raise ConfigError(
                f'mode = "{self.config.mode}" is not supported yet', code="PEN-1009", hint='use mode = "append"'
            )
        if self.config.storage_options:
            raise ConfigError("`storage_options` are not supported yet", code="PEN-1009", hint="use a local directory")
        self._targets = Targets(self._path if "://" not in self.config.path else self.config.path)
        durable.make_directory(self._targets.root)

    def close(self) -> None:
        if self._stage is not None:
            self._stage.abandon()
            self._stage = None
        self._tables.clear()

    # -- in tasks: no call into the client that needs its threads, which do not survive a fork ---------------------

    def begin_epoch(self, epoch: Epoch, task: Task) -> None:
        self._required.clear()
        self._stage = staging.Stage(
            epoch,
            task,
            self._targets,
            suffix=".parquet",
            begin=lambda path, schema: _StatsPart(path, schema, self.config.compression, store_schema=False),
            place=lambda target, path: target / path,
            partition_by=self.config.partition_by,
            target_file_rows=self.config.target_file_rows,
            max_open_files=self.config.max_open_files,
        )

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        assert self._stage is not None
        rows = _as_delta(topic, batch)
        if topic not in self._required:
            self._required[topic] = self._fit_before_writing(topic, rows.schema)
        for name in self._required[topic]:
            if name not in rows.schema.names or rows.column(name).null_count:
                raise SchemaError(
                    f"the column {name!r} of {topic} holds nulls, and the table forbids them", code="PEN-4001"
                )
        for name in self.config.partition_by:
            if name in rows.schema.names and _has_empty_text(rows.column(name)):
                raise DataError(
                    f"the partition column {name!r} of {topic} holds an empty text, which Delta would read as null",
                    hint="give it another value in the route's SQL",
                )
        self._stage.write(topic, rows)
        return WriteResult(batch.num_rows, batch.nbytes)

    def flush(self) -> None:
        assert self._stage is not None
        self._stage.flush()

    def pre_commit(self, epoch: Epoch) -> StagedFiles:
        assert self._stage is not None
        staged = self._stage.finish()
        self._stage = None
        return StagedFiles(staged=staged)

    def _fit_before_writing(self, topic: Topic, rows: pa.Schema) -> list[str]:
        """Refuse rows that could never be committed, before the first of them is staged; gives the columns without nulls."""
        metadata = _read_metadata(self._targets.claim(topic) / "_delta_log")
        if metadata is None:
            return []
        columns = pa.schema(DeltaSchema.from_json(metadata["schemaString"]).to_arrow())
        self._fit(topic, columns, metadata["partitionColumns"], rows)
        return [column.name for column in columns if not column.nullable]

    def _fit(self, topic: Topic, columns: pa.Schema, partition_by: Sequence[str], rows: pa.Schema) -> pa.Schema:
        """The table's columns and those that the rows add to them."""
        if list(partition_by) != list(self.config.partition_by):
            raise SchemaError(
                f"the table of {topic} is partitioned by {list(partition_by)}, not by {list(self.config.partition_by)}",
                code="PEN-4002",
                hint=f"set partition_by = {json.dumps(list(partition_by))}",
            )
        wider = follow(topic, _delta_schema(topic, columns), rows)
        folded: dict[str, str] = {}
        for name in wider.names:
            if folded.setdefault(name.lower(), name) != name:
                raise SchemaError(
                    f"the columns {folded[name.lower()]!r} and {name!r} of {topic} differ in case only",
                    code="PEN-4001",
                    hint="Delta does not tell them apart: rename one in the route's SQL",
                )
        return wider

    # -- on the driver ----------------------------------------------------------------------------------------------

    def commit_topic(self, epoch: Epoch, topic: Topic, receipts: Sequence[StagedFiles], end: Positions) -> None:
        parts = [receipt.staged[topic] for receipt in receipts]
        files = [file for part in parts for file in part.files]
        target = self._targets.claim(topic)
        conflict: DeltaError | None = None
        for _ in range(TRIES):
            table = self._table(topic)
            marker = table.marker(epoch.pipeline) if table else None
            if marker is None and topic in self._committed:
                raise FatalError(
                    f"the Delta table {target} was dropped or replaced while the pipeline ran",
                    code="PEN-5010",
                    hint="put it back; or stop, and `penstock offsets FILE reset` to begin anew",
                )
            if is_committed(marker, epoch):
                assert table is not None
                assert marker is not None
                table.sync(marker.version)  # who made the entry may have died before the sync
                break
            for file in files:
                if not _is_there(target / file.path, file.bytes):
                    raise StagingLost(f"{target / file.path} of {epoch} is gone or has another size")
            try:
                with durable.disk_errors():
                    if table is None:
                        self._create(topic, [unpack_schema(part.columns) for part in parts])
                    elif self._widen(topic, table, [unpack_schema(part.columns) for part in parts]):
                        table.commit(epoch, end, files)
                        break
            except DeltaProtocolError as error:
                raise _unknown_feature(target, error) from error
            except DeltaError as error:
                conflict = error  # another writer was first, or the answer was lost: look again
                self._tables.pop(topic, None)
        else:
            raise RetryableError(
                f"the Delta table {target} refused {TRIES} commits of {epoch}: {conflict}", code="PEN-2005"
            ) from conflict
        self._committed.add(topic)
        staging.drop_lists(self._targets.root, epoch.pipeline, parts)

    def committed_epoch(self, pipeline: str, topic: Topic) -> CommittedEpoch | None:
        table = self._table(topic)
        marker = table.marker(pipeline) if table else None
        return marker and CommittedEpoch(incarnation=marker.incarnation, number=marker.number, end=marker.end)

    def sweep(self, epoch: Epoch, keep: Sequence[StagedFiles]) -> None:
        kept = {os.path.basename(f.path) for receipt in keep for topic in receipt.staged.values() for f in topic.files}
        live: dict[Topic, set[str]] = {}

        def is_kept(topic: Topic, place: Path) -> bool:
            if topic not in live:  # whoever asks: a file of the table is never a leftover
                table = self._table(topic)
                live[topic] = {os.path.basename(uri) for uri in table.delta.file_uris()} if table else set()
            return place.name in kept or place.name in live[topic]

        staging.sweep(self._targets.root, epoch, is_kept)

    def is_seeded(self, topic: Topic) -> bool:
        try:
            seeded = json.loads((self._targets.claim(topic) / HIDDEN / ".seeded").read_bytes())["table"]
        except FileNotFoundError:
            return False
        table = self._table(topic)
        return seeded is None or (table is not None and str(table.delta.metadata().id) == seeded)

    def mark_seeded(self, topic: Topic) -> None:
        table = self._table(topic)
        hidden = self._targets.claim(topic) / HIDDEN
        durable.make_directory(hidden)
        seeded = {"table": str(table.delta.metadata().id) if table else None}
        durable.write_atomic(hidden / ".seeded", durable.canonical(seeded).encode())

    def schema(self, topic: Topic) -> pa.Schema | None:
        """The columns of the table; more may come."""
        table = self._table(topic)
        return table and table.columns()

    def diff_schemas(self, old: pa.Schema, new: pa.Schema) -> Sequence[SchemaChange]:
        return diff(_delta_schema("the topic", old), _delta_schema("the topic", new))

    def evaluate_evolution(self, changes: Sequence[SchemaChange]) -> bool:
        return all(change.kind is not ChangeKind.RETYPED for change in changes)

    def apply_evolution(self, topic: Topic, changes: Sequence[SchemaChange]) -> None:
        table = self._table(topic)
        added = [pa.field(c.column, c.new) for c in changes if c.kind is ChangeKind.ADDED]
        if table is not None and added:
            with _delta_errors(table.path):
                table.add_columns(_delta_schema(topic, pa.schema(added)))

    def _table(self, topic: Topic) -> _Table | None:
        """The topic's table at its newest version, or None."""
        known = self._tables.get(topic)
        path = self._targets.claim(topic)
        if known is not None and known.is_the_same():
            with _delta_errors(path):
                known.refresh()
            return known
        self._tables.pop(topic, None)
        if not (path / "_delta_log").exists():
            return None
        try:
            with _delta_errors(path):
                table = _Table(path, DeltaTable(str(path)))
        except TableNotFoundError:
            return None
        table.refuse_what_append_cannot_keep()
        self._tables[topic] = table
        return table

    def _create(self, topic: Topic, schemas: Sequence[pa.Schema]) -> None:
        path = self._targets.claim(topic)
        schema = schemas[0]
        for each in schemas[1:]:
            schema = follow(topic, schema, each)
        schema = self._fit(topic, schema, self.config.partition_by, schema)
        durable.make_directory(path)
        DeltaTable.create(str(path), schema, mode="ignore", partition_by=list(self.config.partition_by))
        durable.fsync(path / "_delta_log" / f"{0:020d}.json", path / "_delta_log")

    def _widen(self, topic: Topic, table: _Table, schemas: Sequence[pa.Schema]) -> bool:
        """True when the table has every column; otherwise they are added, and the marker is to be looked at again."""
        columns = wider = table.columns()
        for each in schemas:
            wider = self._fit(topic, wider, table.partition_by(), each)
        added = [column for column in wider if column.name not in columns.names]
        if added:
            table.add_columns(pa.schema(added))
        return not added


@dataclass
class _Table:
    """A Delta table on a local disk, and how far its log is known to be on it."""

    path: Path
    delta: DeltaTable
    markers: dict[str, tuple[int, Sidecar]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._synced = self.delta.version() - 1
        self._seen = self._stat()

    def is_the_same(self) -> bool:
        """False when the table was dropped, or dropped and made again: then the client would go on with the old one."""
        return self._seen is not None and self._stat() == self._seen

    def refresh(self) -> None:
        self.delta.update_incremental()
        self._seen = self._stat()

    def columns(self) -> pa.Schema:
        return pa.schema(self.delta.schema().to_arrow())

    def partition_by(self) -> list[str]:
        return list(self.delta.metadata().partition_columns)

    def marker(self, pipeline: str) -> Sidecar | None:
        """The sidecar that the newest transaction of the pipeline names."""
        sequence = self.delta.transaction_version(_app(pipeline))
        known = self.markers.get(pipeline)
        if known is not None and known[0] == sequence:
            return known[1]
        if sequence is None:
            if max(self._sidecars(pipeline), default=1) > 1:
                raise FatalError(
                    f"the log of {self.path} no longer holds the transactions of {pipeline}, but epochs were committed",
                    code="PEN-5020",
                    hint="they were removed from the log: restore the table, or write to a new one",
                )
            return None
        for name in self._sidecars(pipeline).get(sequence, ()):
            with contextlib.suppress(FileNotFoundError):
                sidecar = Sidecar.model_validate_json((self._hidden(pipeline) / name).read_bytes())
                if self.delta.transaction_version(_app(pipeline, sidecar.incarnation)) == sidecar.number:
                    self.markers[pipeline] = (sequence, sidecar)
                    return sidecar
        self.refresh()
        if self.delta.transaction_version(_app(pipeline)) != sequence:
            return self.marker(pipeline)  # another process has committed, and dropped the old sidecar
        raise FatalError(
            f"{self._hidden(pipeline)} lacks the file of commit {sequence}, which says where the sources stood",
            code="PEN-5020",
            hint="restore the directory from a copy; or write to a new table",
        )

    def commit(self, epoch: Epoch, end: Positions, files: Sequence[StagedFile]) -> None:
        """Make the version after the one that is loaded, or raise `CommitFailedError`."""
        version = self.delta.version() + 1
        sequence = (self.delta.transaction_version(_app(epoch.pipeline)) or 0) + 1
        sidecar = Sidecar(incarnation=epoch.incarnation, number=epoch.number, end=dict(end), version=version)
        hidden = self._hidden(epoch.pipeline)
        durable.make_directory(hidden)
        durable.write_atomic(hidden / f"{sequence:012d}-{epoch.attempt}.json", _json(sidecar))
        if not self.markers:
            durable.fsync(hidden, hidden.parent)  # who made them may have died before the sync
        now = int(time.time() * 1000)
        failpoints.hit("commit.before")
        self.delta.create_write_transaction(
            [AddAction(f.path, f.bytes, f.partition, now, True, f.stats or "") for f in files],
            "append",
            self.delta.schema(),
            self.partition_by(),
            commit_properties=CommitProperties(
                custom_metadata={"penstock": {"pipeline": epoch.pipeline, "epoch": epoch.number}},
                max_commit_retries=_NO_RETRIES,
                app_transactions=[
                    Transaction(_app(epoch.pipeline), sequence),
                    Transaction(_app(epoch.pipeline, epoch.incarnation), epoch.number),
                ],
            ),
            post_commithook_properties=_HOOKS,
        )
        self.sync(version)
        self.markers[epoch.pipeline] = (sequence, sidecar)
        for old, names in self._sidecars(epoch.pipeline).items():
            for name in names if old < sequence - 1 else ():  # one more is kept for who reads the previous version now
                (hidden / name).unlink(missing_ok=True)

    def add_columns(self, columns: pa.Schema) -> None:
        self.delta.alter.add_columns(
            list(DeltaSchema.from_arrow(columns).fields),
            commit_properties=CommitProperties(max_commit_retries=_NO_RETRIES),
            post_commithook_properties=_HOOKS,
        )
        self.refresh()
        self.sync(self.delta.version())

    def sync(self, version: int) -> None:
        """Sync every entry of the log up to `version` that is not known to be, and the checkpoint made with it."""
        versions = range(min(self._synced + 1, version), max(self.delta.version(), version) + 1)
        names = [f"{v:020d}.json" for v in versions] + [f"{v:020d}.checkpoint.parquet" for v in versions]
        log = self.path / "_delta_log"
        found = [path for name in names if (path := log / name).exists()]
        if any(path.suffix == ".parquet" for path in found):
            durable.fsync(*found, log / "_last_checkpoint")
            self._drop_old_entries()
        else:
            durable.fsync(*found)
        self._synced = versions[-1]

    def _drop_old_entries(self) -> None:
        """Drop entries older than the table keeps: only now, since the checkpoint that stands for them is on disk."""
        if self.delta.metadata().configuration.get("delta.enableExpiredLogCleanup", "true") == "true":
            self.delta.cleanup_metadata()

    def refuse_what_append_cannot_keep(self) -> None:
        """Tables with rules that only a full Delta writer applies: rows would break them unseen."""
        metadata, columns = self.delta.metadata(), self.delta.schema().fields
        rules = [feature for feature in self.delta.protocol().writer_features or () if feature not in _FEATURES]
        rules += [key for key in metadata.configuration if key.startswith("delta.constraints.")]
        rules += [key for key in ("delta.setTransactionRetentionDuration",) if key in metadata.configuration]
        if metadata.configuration.get("delta.columnMapping.mode", "none") != "none":
            rules.append("delta.columnMapping.mode")
        rules += [
            f"{key} of {column.name}" for column in columns for key in column.metadata if key.startswith("delta.")
        ]
        if rules:
            raise SchemaError(
                f"the Delta table {self.path} has what cannot be kept to when rows are appended: {', '.join(rules)}",
                code="PEN-4002",
                hint="write to another table",
            )

    def _sidecars(self, pipeline: str) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._hidden(pipeline)):
                if name[:1].isdigit():
                    found.setdefault(int(name[:12]), []).append(name)
        return found

    def _hidden(self, pipeline: str) -> Path:
        return self.path / HIDDEN / quote(pipeline, safe="")

    def _stat(self) -> tuple[int, int] | None:
        """What tells the newest entry of the log from another one with its name."""
        try:
            found = os.stat(self.path / "_delta_log" / f"{self.delta.version():020d}.json")
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns


class _StatsPart(staging.ParquetPart):
    """A Parquet file with the statistics that Delta's log holds of it."""

    def __init__(self, path: Path, schema: pa.Schema, compression: str, **options: Any) -> None:
        super().__init__(path, schema, compression, **options)
        self._schema = schema
        self._with_nan: set[str] = set()

    def write(self, table: pa.Table) -> None:
        super().write(table)
        for column in table.schema:
            # NaN is above all numbers to Delta's readers and unknown to Parquet's bounds.
            if types.is_floating(column.type) and pc.any(pc.is_nan(table.column(column.name))).as_py():
                self._with_nan.add(column.name)

    def close(self) -> str | None:
        super().close()
        return _stats(self.metadata[0], self._schema, self._with_nan)


_HOOKS = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)
"""Checkpoints at the table's interval. Old entries stay: they may go only once the checkpoint is known to be on disk."""

_FEATURES = {
    *("appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns", "identityColumns"),
    *("columnMapping", "timestampNtz", "deletionVectors", "v2Checkpoint", "variantType"),
}
"""Features of tables that the client can commit to; those that add rules are looked at where the rules stand."""

_NO_RETRIES = 0
"""The client would put the commit on top of one whose marker nobody has looked at."""

_BOUND_CHARS = 32
_LAST_CHAR = "\U0010ffff"


def _app(pipeline: str, incarnation: str | None = None) -> str:
    return f"penstock:{pipeline}" if incarnation is None else f"penstock:{pipeline}:{incarnation}"


def _json(value: Sidecar) -> bytes:
    return durable.canonical(value.model_dump(mode="json")).encode()


def _has_empty_text(column: pa.Array) -> bool:
    return bool(types.is_string(column.type) and pc.any(pc.equal(column, "")).as_py())


def _is_there(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _delta_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (TableNotFoundError, CommitFailedError):
        raise
    except DeltaProtocolError as error:
        raise _unknown_feature(path, error) from error
    except DeltaError as error:
        raise FatalError(f"the Delta table {path} cannot be read: {error}", code="PEN-5001") from error


def _unknown_feature(path: Path, error: DeltaProtocolError) -> SchemaError:
    return SchemaError(
        f"the Delta table {path} uses a feature that this writer does not know: {error}",
        code="PEN-4002",
        hint="write to another table, or drop the feature from it",
    )


def _read_metadata(log: Path) -> dict[str, Any] | None:
    """
    The newest metadata in a table's log, read without the client, whose threads do not survive a fork.

    None when there is no table, or when its checkpoints are of a kind that only the client reads: the commit tells then.
    """
    names = sorted(os.listdir(log), reverse=True) if log.exists() else []
    last: int | None = None
    for name in names:
        if not (found := re.fullmatch(r"(\d{20})\.(json|checkpoint\.parquet)", name)):
            continue
        version, kind = int(found[1]), found[2]
        if last is not None and version < last - 1:
            return None
        last = version
        if kind == "json":
            actions = [json.loads(x) for x in (log / name).read_bytes().splitlines() if b'"metaData"' in x]
        else:
            actions = pq.read_table(log / name, columns=["metaData"]).drop_null().to_pylist()
        for action in actions:
            if action.get("metaData"):
                return dict(action["metaData"])
    return None


def _as_delta(topic: Topic, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch in types that Delta has, without loss; columns of type null are left out until they have a value."""
    nulls = [column.name for column in batch.schema if types.is_null(column.type)]
    batch = batch.drop_columns(nulls) if nulls else batch
    schema = _delta_schema(topic, batch.schema)
    try:
        return batch.cast(schema) if batch.schema != schema else batch.replace_schema_metadata(None)
    except pa.ArrowInvalid as error:
        raise DataError(f"a value of {topic} does not fit its column in Delta: {error}") from error


def _delta_schema(topic: Topic, schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(column.name, _delta_type(topic, column.name, column.type)) for column in schema])


def _delta_type(topic: Topic, name: str, kind: pa.DataType) -> pa.DataType:
    """The Delta type that holds every value of `kind`."""
    if isinstance(kind, pa.BaseExtensionType):
        return _delta_type(topic, name, kind.storage_type)
    if types.is_dictionary(kind):
        return _delta_type(topic, name, kind.value_type)
    if types.is_timestamp(kind) and kind.unit != "ns":
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if types.is_decimal(kind) and kind.precision <= 38:
        return pa.decimal128(kind.precision, kind.scale)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(pa.field("element", _delta_type(topic, name, kind.value_type)))
    if types.is_map(kind):
        return pa.map_(_delta_type(topic, name, kind.key_type), _delta_type(topic, name, kind.item_type))
    if types.is_struct(kind):
        inner = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([pa.field(each.name, _delta_type(topic, f"{name}.{each.name}", each.type)) for each in inner])
    for is_kind, stored in _STORED:
        if is_kind(kind):
            return stored or kind
    raise SchemaError(
        f"the column {name!r} of {topic} is {kind}, which Delta cannot hold without loss",
        code="PEN-4002",
        hint="cast it in the route's SQL",
    )


_STORED: list[tuple[Any, pa.DataType | None]] = [
    (types.is_boolean, None),
    (types.is_signed_integer, None),
    (types.is_uint8, pa.int16()),
    (types.is_uint16, pa.int32()),
    (types.is_uint32, pa.int64()),
    (types.is_float16, pa.float32()),
    (types.is_floating, None),
    (types.is_date, pa.date32()),
    (types.is_string, None),
    (types.is_large_string, pa.string()),
    (types.is_string_view, pa.string()),
    (types.is_binary, None),
    (types.is_large_binary, pa.binary()),
    (types.is_binary_view, pa.binary()),
    (types.is_fixed_size_binary, pa.binary()),
]
"""Delta's type for each simple type of Arrow; None: the same."""


def _stats(metadata: pq.FileMetaData, schema: pa.Schema, with_nan: set[str]) -> str:
    """Rows, nulls and bounds of the first columns, for readers that skip files."""
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    positions = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
    for column in list(schema)[:STATS_COLUMNS]:
        position = positions.get(column.name)
        if position is None:
            continue  # nested
        found = [group.column(position).statistics for group in groups]
        if any(each is None or not each.has_null_count for each in found):
            continue
        nulls[column.name] = sum(each.null_count for each in found)
        filled = [each for each, group in zip(found, groups, strict=True) if each.null_count < group.num_rows]
        if not filled or column.name in with_nan or not all(each.has_min_max for each in filled):
            continue
        try:
            bounds = _bounds(min(each.min for each in filled), max(each.max for each in filled))
        except (OverflowError, ValueError):
            continue  # a time that Python has not
        if bounds is not None:
            lows[column.name], highs[column.name] = bounds
    stats = {"numRecords": metadata.num_rows, "minValues": lows, "maxValues": highs, "nullCount": nulls}
    return durable.canonical(stats)


def _bounds(low: Any, high: Any) -> tuple[Any, Any] | None:
    """The two as JSON, rounded outwards; None for types without bounds in the log."""
    if isinstance(low, str):
        cut = high if len(high) <= _BOUND_CHARS else high[:_BOUND_CHARS] + _LAST_CHAR
        return (low[:_BOUND_CHARS], cut) if cut >= high else None
    if isinstance(low, datetime.datetime):
        up = datetime.timedelta(microseconds=-high.microsecond % 1000)
        zone = "Z" if low.tzinfo else ""
        low, high = (each.replace(tzinfo=None).isoformat("T", "milliseconds") + zone for each in (low, high + up))
        return low, high
    if isinstance(low, datetime.date):
        return low.isoformat(), high.isoformat()
    if isinstance(low, int | float) and not isinstance(low, bool) and abs(low) != float("inf") != abs(high):
        return low, high
    return None
