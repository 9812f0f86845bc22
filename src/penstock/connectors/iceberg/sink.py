"""Append topics to Iceberg tables in a SQL catalog, each epoch exactly once."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import PositiveInt
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from penstock import durable
from penstock.config import Secret
from penstock.connectors.iceberg.columns import (
    Columns,
    StatsPart,
    as_iceberg,
    iceberg_schema,
    ids_of,
    nests_structs,
    read_stats,
    widens,
)
from penstock.connectors.iceberg.layout import IcebergStage, Layout
from penstock.connectors.iceberg.table import PROPERTIES, SEEDED, Catalog, Table, catalog_errors
from penstock.connectors.lake import staging
from penstock.connectors.lake.staging import HIDDEN, StagedFile, StagedFiles, StagedTopic, StagingConfig, StagingSink
from penstock.errors import ConfigError, FatalError, RetryableError, SchemaError, StagingLost
from penstock.schema import ChangeKind, SchemaChange, key_of
from penstock.schema.evolution import Policy, diff, follow, refusal, widened
from penstock.sink import CommittedEpoch, Epoch, Positions, SinkContext, Task, Topic, WriteResult, is_committed

REWRITER = Task(99_999)
"""Whose files the driver's are, in their names."""

TRIES = 20
"""Commits of other writers that one commit gives way to before it fails for a while."""

_NONE = Columns(pa.schema([]))
_CONFLICTS = (CommitFailedException, TableAlreadyExistsError, NoSuchTableError, FileNotFoundError)
"""Another writer was first: look again."""


class IcebergConfig(StagingConfig):
    identity = StagingConfig.identity | {"catalog", "namespace"}

    mode: Literal["append", "upsert", "changes"] = "append"
    """How rows are applied: `append` adds them; `changes` adds every change with the columns that describe it; `upsert`
    is not supported yet."""

    catalog_uri: str = ""
    """The catalog's database: `sqlite:////data/lake/catalog.db` or `postgresql://user@host/database`, without a password;
    by default the SQLite file `catalog.db` in the directory above all tables."""

    catalog_password: Secret | None = None
    """The password of the catalog's database."""

    catalog: str = "default"
    """Name of the catalog in its database, which may hold several."""

    table: str = "{topic}"
    """Name of a topic's table, e.g. `lake.{topic}`; slashes become dots, and what stands before the last is the namespace."""

    namespace: str = "default"
    """Namespace of tables whose name has none."""

    partition_by: tuple[str, ...] = ()
    """Partitions of tables that are created: columns, or the days of one: `["country", "day(ts)"]`. An existing table must
    have the same."""

    compression: Literal["zstd", "snappy", "gzip", "none"] = "zstd"
    """Compression of the Parquet files."""

    keep_snapshots: PositiveInt = 20
    """How many snapshots of a table readers may go back to; older ones are expired with every commit."""


class Iceberg(StagingSink[IcebergConfig]):
    """
    Tasks write Parquet files with field ids into the table's directory; the driver commits them in one change of the
    table, together with columns that are new or wider and with the marker, which is a property of the table and stands
    in the snapshot's summary too. Old snapshots and metadata files are dropped and small manifests are merged as it goes.
    Numbers get wider types without a rewrite; a date column that becomes a timestamp is another column for Iceberg, so
    the driver writes the table's files anew in that commit, and the old ones go with the last snapshot that names them.

    Supports exactly-once: a commit is refused by the catalog unless it starts from the snapshot whose marker was looked
    at. Readers see whole epochs. Other writers may append to the table meanwhile. `changes` adds the capability changelog.
    """

    name = "iceberg"

    def __init__(self, config: IcebergConfig) -> None:
        super().__init__(config)
        self._uri = config.catalog_uri
        if config.catalog_uri.startswith("sqlite:///"):
            self._uri = "sqlite:///" + os.path.abspath(config.catalog_uri.removeprefix("sqlite:///"))
        self._catalogs: dict[int, Catalog] = {}
        self._known: dict[Topic, Columns] = {}
        self._committed: set[Topic] = set()
        self._hinted: dict[Topic, str] = {}
        self._claims: dict[tuple[str, str], Topic] = {}
        if self.config.mode == "changes":
            self.capabilities = self.capabilities.with_changelog()

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.config.model_copy(update={"path": self._path, "catalog_uri": self._uri}),)

    def open(self, context: SinkContext = SinkContext()) -> None:
        if self.config.mode == "upsert":
            raise ConfigError(
                '`mode = "upsert"` is not supported yet', code="PEN-1009", hint='use "append" or "changes"; or delta'
            )
        rest = self.config.table.replace("{topic}", "")
        if "{" in rest or "}" in rest:
            raise ConfigError(
                f"`table` holds a placeholder that is not known: {self.config.table}",
                code="PEN-1003",
                hint="only {topic} is",
            )
        self._layout = Layout.parse(self.config.partition_by)
        super().open(context)
        self._url = self._catalog_url()

    def close(self) -> None:
        super().close()
        for pid, catalog in self._catalogs.items():
            catalog.engine.dispose(close=pid == os.getpid())
        self._catalogs.clear()

    # -- in tasks: no call to the catalog where the driver has left word of the table's columns ---------------------

    def begin_epoch(self, epoch: Epoch, task: Task) -> None:
        self._known.clear()
        self._accepted.clear()
        self._stage = self._staging(epoch, task)

    def begin_file(self, path: Path, schema: pa.Schema) -> staging.Part:
        return StatsPart(path, schema, self.config.compression)

    def place(self, target: Path, path: str) -> Path:
        return target / "data" / path

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        assert self._stage is not None
        rows, lost = self.fit(topic, as_iceberg(topic, batch), key_of(batch.schema))
        columns = self._known[topic]
        rows = rows.select([name for name in rows.schema.names if name in columns.schema.names])
        for name in columns.required():
            if name not in rows.schema.names or rows.column(name).null_count:
                raise SchemaError(
                    f"the column {name!r} of {topic} holds nulls, and the table forbids them", code="PEN-4001"
                )
        self._stage.write(topic, pa.RecordBatch.from_arrays(rows.columns, schema=columns.select(rows.schema)))
        return WriteResult(rows.num_rows, batch.nbytes, lost)

    def accept(self, topic: Topic, rows: pa.Schema, policy: Policy) -> pa.Schema:
        if topic not in self._known:
            self._known[topic] = self._columns(topic)
        self._known[topic] = self._wider(topic, self._known[topic], rows, policy)
        return iceberg_schema(topic, self._known[topic].schema)

    def widens(self, old: pa.DataType, new: pa.DataType) -> bool:
        return widens(old, new)

    def _columns(self, topic: Topic) -> Columns:
        """The table's columns, as the driver has last seen them; the commit looks again."""
        with contextlib.suppress(FileNotFoundError):
            return Columns.from_json(self._hint(topic).read_text())
        table = self._table(topic)
        return table.columns() if table else _NONE

    def _wider(self, topic: Topic, columns: Columns, rows: pa.Schema, policy: Policy = Policy.EVOLVE) -> Columns:
        """
        The columns and what rows of a schema add to them.

        The commit always evolves: what is staged has passed the policy, and can only go forward.
        """
        if not len(columns.schema):
            return columns.with_types(rows)
        stored = iceberg_schema(topic, columns.schema)
        wider = follow(topic, stored, rows, policy, widens)
        laid_out_by, nested = [each.column for each in self._layout], any(nests_structs(each.type) for each in stored)
        for name in columns.renewed(wider):
            if name in laid_out_by or nested:
                raise refusal(topic, name, stored.field(name).type, wider.field(name).type, policy, is_wider=True)
        return columns.with_types(wider)

    def _staging(self, epoch: Epoch, task: Task) -> IcebergStage:
        return IcebergStage(
            epoch,
            task,
            self._targets,
            suffix=self.suffix(),
            begin=self.begin_file,
            place=self.place,
            partition_by=[each.name for each in self._layout],
            target_file_rows=self.config.target_file_rows,
            max_open_files=self.config.max_open_files,
            widens=widens,
            layout=self._layout,
        )

    # -- on the driver ----------------------------------------------------------------------------------------------

    def commit_topic(self, epoch: Epoch, topic: Topic, receipts: Sequence[StagedFiles], end: Positions) -> None:
        parts = [receipt.staged[topic] for receipt in receipts]
        target = self._targets.claim(topic)
        conflict: Exception | None = None
        for _ in range(TRIES):
            try:
                table = self._table(topic)
                if self._is_done(epoch, topic, table):
                    break
                places = [(self.place(target, file.path), file.bytes) for part in parts for file in part.files]
                lost = next((place for place, size in places if not staging.is_there(place, size)), None)
                if lost is not None:
                    if self._is_done(epoch, topic, self._table(topic)):
                        break  # a twin was faster, and has dropped a file that it wrote anew
                    raise StagingLost(f"{lost} of {epoch} is gone or has another size")
                with durable.disk_errors(), catalog_errors(topic):
                    if table is None:
                        self._create(topic, [staging.unpack_schema(part.columns) for part in parts])
                    else:
                        self._commit(epoch, topic, table, parts, end)
                        break
            except _CONFLICTS as error:
                conflict = error
        else:
            raise RetryableError(
                f"the Iceberg table of {topic} refused {TRIES} commits of {epoch}: {conflict}", code="PEN-2005"
            ) from conflict
        self._committed.add(topic)
        self._tidy(epoch, topic, parts)

    def _is_done(self, epoch: Epoch, topic: Topic, table: Table | None) -> bool:
        marker = table.marker(epoch.pipeline) if table else None
        if marker is None and topic in self._committed:
            raise FatalError(
                f"the Iceberg table of {topic} was dropped or replaced while the pipeline ran",
                code="PEN-5010",
                hint="put it back; or stop, and `penstock offsets reset FILE` to begin anew",
            )
        if not is_committed(marker, epoch):
            return False
        self._catalog().sync()
        return True

    def _commit(self, epoch: Epoch, topic: Topic, table: Table, parts: Sequence[StagedTopic], end: Positions) -> None:
        columns = known = table.columns()
        for part in parts:
            columns = self._wider(topic, columns, staging.unpack_schema(part.columns))
        ids = dict(ids_of(columns.schema))
        target = self._targets.claim(topic)
        files = [file for part in parts for file in part.files]
        # Tasks that add columns at once may give one id to two of them.
        mixed_up = [file for file in files if not read_stats(file)["ids"].items() <= ids.items()]
        as_data = partial(self._data_file, table, columns, target)
        stages = [self._staging(epoch, REWRITER) for _ in range(2)]
        is_written, anew = False, None
        try:
            rows = _batches([self.place(target, file.path) for file in mixed_up])
            files = [file for file in files if file not in mixed_up] + _rewrite(stages[0], topic, rows, columns)
            if known.renewed(columns.schema) and table.metadata.current_snapshot() is not None:
                anew = list(map(as_data, _rewrite(stages[1], topic, table.batches(), columns)))
            added = list(map(as_data, files))
            is_written = True
            table.commit(epoch, end, columns, added, self.config.keep_snapshots, anew)
        except BaseException as error:
            may_be_there = is_written and not isinstance(error, CommitFailedException)
            for stage in () if may_be_there else stages:
                stage.abandon()
                staging.sweep(self._targets.root, epoch, lambda *_: False, stage.stem)
            raise
        self._leave_word(topic, table.columns())

    def _tidy(self, epoch: Epoch, topic: Topic, parts: Sequence[StagedTopic]) -> None:
        """Of a committed topic: drop staged files that were written anew, and what tries that died have written for them."""
        lists = f"{epoch.stem()}-{REWRITER.partition:05d}-"
        if staging.has_lists(self._targets.root, epoch, lists):
            table, target = self._table(topic), self._targets.claim(topic)
            live = table.live_files() if table else set()
            for place in (self.place(target, file.path) for part in parts for file in part.files):
                if place.name not in live:
                    place.unlink(missing_ok=True)
            staging.sweep(self._targets.root, epoch, lambda _, place: place.name in live, lists, only=topic)
        staging.drop_lists(self._targets.root, epoch.pipeline, parts)

    def _data_file(self, table: Table, columns: Columns, target: Path, file: StagedFile) -> DataFile:
        place, stats = self.place(target, file.path), read_stats(file)
        del stats["ids"]
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=str(place),
            file_format=FileFormat.PARQUET,
            partition=self._layout.record(file.partition, columns.schema),
            file_size_in_bytes=file.bytes,
            sort_order_id=None,
            spec_id=table.metadata.default_spec_id,
            equality_ids=None,
            key_metadata=None,
            **stats,
        )

    def _create(self, topic: Topic, schemas: Sequence[pa.Schema]) -> None:
        columns = _NONE
        for each in schemas:
            columns = self._wider(topic, columns, each)
        schema = columns.iceberg()
        namespace, _ = identifier = self._identifier(topic)
        self._make_namespace(namespace)
        location = self._targets.claim(topic)
        durable.make_directory(location / "metadata")
        seeded = self._is_marked_seeded(topic)
        self._catalog().create_table(
            identifier,
            schema,
            location=str(location),
            partition_spec=self._layout.spec(schema),
            properties={**PROPERTIES, **({SEEDED: "true"} if seeded else {})},
        )
        if seeded:
            self._catalog().update_namespace_properties(namespace, removals={self._seeded_key(topic)})

    def committed_epoch(self, pipeline: str, topic: Topic) -> CommittedEpoch | None:
        table = self._table(topic)
        self._leave_word(topic, table.columns() if table else _NONE)
        marker = table.marker(pipeline) if table else None
        if marker is not None:
            self._committed.add(topic)
        return marker

    def sweep(self, epoch: Epoch, keep: Sequence[StagedFiles]) -> None:
        kept = staging.names(keep)
        live: dict[Topic, set[str]] = {}

        def is_kept(topic: Topic, place: Path) -> bool:
            if topic not in live:  # whoever asks: a file of the table is never a leftover
                table = self._table(topic)
                live[topic] = table.live_files() if table else set()
            return place.name in kept or place.name in live[topic]

        staging.sweep(self._targets.root, epoch, is_kept)

    def is_seeded(self, topic: Topic) -> bool:
        table = self._table(topic)
        return table.is_seeded() if table else self._is_marked_seeded(topic)

    def mark_seeded(self, topic: Topic) -> None:
        conflict: Exception | None = None
        for _ in range(TRIES):
            try:
                with durable.disk_errors(), catalog_errors(topic):
                    self._mark_seeded(topic, self._table(topic))
                return
            except _CONFLICTS as error:
                conflict = error
        raise RetryableError(f"the Iceberg table of {topic} refused {TRIES} changes: {conflict}", code="PEN-2005")

    def _mark_seeded(self, topic: Topic, table: Table | None) -> None:
        now = self.context.topic(topic).source_schema
        if table is None and now is not None:  # no rows came: readers find it empty, and not missing
            with contextlib.suppress(SchemaError, ValueError):  # if they have no place there, the first row will say so
                self._create(topic, [iceberg_schema(topic, now)])
            table = self._table(topic)
        if table is None:
            namespace, _ = self._identifier(topic)
            self._make_namespace(namespace)
            self._catalog().update_namespace_properties(namespace, updates={self._seeded_key(topic): "true"})
        elif not table.is_seeded():
            table.mark_seeded()

    def _make_namespace(self, namespace: str) -> None:
        with contextlib.suppress(NamespaceAlreadyExistsError):
            self._catalog().create_namespace(namespace)

    def _is_marked_seeded(self, topic: Topic) -> bool:
        """What the namespace says of a topic that has no table, since no row of it has come."""
        with catalog_errors(topic):
            try:
                properties = self._catalog().load_namespace_properties(self._identifier(topic)[0])
            except NoSuchNamespaceError:
                return False
        return properties.get(self._seeded_key(topic)) == "true"

    def _seeded_key(self, topic: Topic) -> str:
        return f"{SEEDED}.{hashlib.sha256(self._identifier(topic)[1].encode()).hexdigest()[:32]}"

    def schema(self, topic: Topic) -> pa.Schema | None:
        """The columns of the table; more may come."""
        table = self._table(topic)
        return table and iceberg_schema(topic, table.columns().schema)

    def diff_schemas(self, old: pa.Schema, new: pa.Schema) -> Sequence[SchemaChange]:
        return diff(*(iceberg_schema("the topic", schema) for schema in (old, new)))

    def evaluate_evolution(self, changes: Sequence[SchemaChange], refilled: Topic | None = None) -> bool:
        return all(
            change.kind is not ChangeKind.RETYPED or widens(change.old, change.new) or widens(change.new, change.old)
            for change in changes
        )

    def apply_evolution(self, topic: Topic, changes: Sequence[SchemaChange]) -> None:
        """Nothing: columns change in the commit that brings their first rows."""

    def _leave_word(self, topic: Topic, columns: Columns) -> None:
        """Tell the tasks of the next epoch which columns the table has, so that they need not ask the catalog."""
        text = columns.to_json()
        if self._hinted.get(topic) != text:
            path = self._hint(topic)
            durable.make_directory(path.parent)
            durable.write_atomic(path, text.encode())
            self._hinted[topic] = text

    def _hint(self, topic: Topic) -> Path:
        return self._targets.claim(topic) / HIDDEN / ".columns"

    def _table(self, topic: Topic) -> Table | None:
        """The topic's table as it is now, or None."""
        self._targets.claim(topic)
        with catalog_errors(topic):
            try:
                table = self._catalog().table(topic, self._identifier(topic))
            except NoSuchTableError:
                return None
        self._layout.refuse_another(topic, table.metadata.schema(), table.metadata.spec())
        return table

    def _identifier(self, topic: Topic) -> tuple[str, str]:
        """Namespace and name of the topic's table; refused when another topic has the same."""
        name = self.config.table.replace("{topic}", topic.removeprefix("/")).replace("/", ".")
        namespace, _, name = name.rpartition(".")
        identifier = (namespace or self.config.namespace, name)
        other = self._claims.setdefault(identifier, topic)
        if other != topic:
            raise ConfigError(
                f"the topics {other} and {topic} meet in the table {'.'.join(identifier)}",
                code="PEN-1011",
                hint='give each a table of its own: table = "….{topic}"',
            )
        return identifier

    def _catalog(self) -> Catalog:
        """The catalog of this process: its connections do not survive a fork."""
        if os.getpid() not in self._catalogs:
            try:
                try:
                    self._catalogs[os.getpid()] = Catalog(self.config.catalog, self._url)
                except DBAPIError:  # two tasks that make its tables at once: the other one was first
                    self._catalogs[os.getpid()] = Catalog(self.config.catalog, self._url)
            except DBAPIError as error:
                raise FatalError(
                    f"the catalog at {self._url.render_as_string()} cannot be reached: {error.orig}",
                    code="PEN-5001",
                    hint="look at `catalog_uri` and `catalog_password`",
                ) from error
        return self._catalogs[os.getpid()]

    def _catalog_url(self) -> URL:
        try:
            url = make_url(self._uri or f"sqlite:///{self._targets.root / 'catalog.db'}")
        except ArgumentError as error:
            raise ConfigError(f"`catalog_uri` cannot be read: {error}", code="PEN-1003") from error
        if url.password:
            raise ConfigError(
                "`catalog_uri` holds a password",
                code="PEN-1003",
                hint='leave it out, and give it as catalog_password = { env = "NAME" }',
            )
        if url.get_backend_name() not in ("sqlite", "postgresql"):
            raise ConfigError(
                f"a catalog in {url.get_backend_name()} is not supported yet",
                code="PEN-1009",
                hint="use sqlite:/// or postgresql://",
            )
        if url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        return url.set(password=self.config.catalog_password.reveal()) if self.config.catalog_password else url


def _rewrite(
    stage: IcebergStage, topic: Topic, batches: Iterable[pa.RecordBatch], columns: Columns
) -> list[StagedFile]:
    """Write rows anew with the types and the field ids of the columns; nothing of it is visible."""
    for batch in batches:
        schema = pa.schema([columns.schema.field(name) for name in batch.schema.names])
        try:
            values = [widened(each, field.type) for each, field in zip(batch.columns, schema, strict=True)]
        except pa.ArrowInvalid as error:
            raise FatalError(
                f"a value of {topic} does not fit the wider type of its column: {error}",
                code="PEN-5021",
                hint="a date may lie beyond the last timestamp: correct or delete its row in the table, and start again",
            ) from error
        stage.write(topic, pa.RecordBatch.from_arrays(values, schema=schema))
    return [file for part in stage.finish().values() for file in part.files]


def _batches(places: Sequence[Path]) -> Iterator[pa.RecordBatch]:
    for place in places:
        yield from pq.ParquetFile(place).iter_batches(batch_size=staging.ROW_GROUP_ROWS)
