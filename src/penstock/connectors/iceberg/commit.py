"""The driver's side of an Iceberg table: create it, commit to it, and leave a note of its columns for tasks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table.refs import MAIN_BRANCH
from sqlalchemy.exc import IntegrityError

from penstock import durable, store
from penstock.connectors.iceberg.apply import sent_columns
from penstock.connectors.iceberg.catalog import AnyCatalog
from penstock.connectors.iceberg.columns import (
    Columns,
    iceberg_schema,
    ids_of,
    nests_structs,
    read_stats,
    refuse_one_path,
    widens,
)
from penstock.connectors.iceberg.layout import Layout
from penstock.connectors.iceberg.second import SecondStage
from penstock.connectors.iceberg.table import PROPERTIES, SEEDED, Live, Table, fork, refuse_without_deletes, seeded_key
from penstock.connectors.iceberg.upsert import head, own_rows
from penstock.connectors.iceberg.vended import TableTargets, place_of
from penstock.connectors.lake import commit as loop
from penstock.connectors.lake import lists
from penstock.connectors.lake.changed import changes_of
from penstock.connectors.lake.commit import Commit, LakeTarget
from penstock.connectors.lake.staging import ROW_GROUP_ROWS, Stage, StagedFile
from penstock.connectors.lake.targets import HIDDEN
from penstock.errors import FatalError, RetryableError, SchemaError, reason_of
from penstock.schema.evolution import Policy, follow, refusal, widened
from penstock.sink import CommittedEpoch, Epoch, Task, Topic
from penstock.store import Place

if TYPE_CHECKING:
    from pyiceberg.table import Table as IcebergTable

    from penstock.connectors.iceberg.sink import Iceberg

REWRITER = Task(99_999)
"""Task number in the names of files that the driver writes."""

NO_COLUMNS = Columns(pa.schema([]))


class IcebergTarget(LakeTarget[Table]):
    """One topic's table."""

    conflicts = (CommitFailedException, TableAlreadyExistsError, NoSuchTableError, FileNotFoundError)

    def __init__(self, sink: Iceberg, topic: Topic) -> None:
        super().__init__(topic, sink.targets.claim(topic), sink.targets.lists_of(topic))
        self.sink = sink
        self.layout = sink.layout
        self.branch = sink.config.branch
        self.identifier = sink.names.claim(topic)
        self._noted = ""
        self._live = Live()
        self._unseen = SeededNote(self)
        self.second = SecondStage(self)

    @property
    def name(self) -> str:
        return f"the Iceberg table of {self.topic}"

    @property
    def catalog(self) -> AnyCatalog:
        return self.sink.catalogs.here()

    # -- the commit ------------------------------------------------------------------------------------------------

    def load(self) -> Table | None:
        with self.sink.catalog_errors(self.topic):
            found = _found(self.catalog, self.identifier, self.name)
            if found is None:
                return None
            if self.sink.is_vended:
                # It may be reached with other keys than at the last look.
                self.path = self.root = place_of(
                    found.metadata.location, found.io.properties, self.sink.config.storage_options
                )
                assert isinstance(self.sink.targets, TableTargets)
                self.sink.targets.found(self.topic, self.path)
            table = Table(self.topic, found, self.catalog, self.path, self.branch)
        self.layout.refuse_another(self.topic, table.metadata.schema(), table.metadata.spec())
        if self.sink.config.upserts:
            refuse_without_deletes(table)
        return table

    def marker(self, loaded: Table, pipeline: str) -> CommittedEpoch | None:
        return loaded.marker(pipeline)

    def saw(self, loaded: Table | None) -> None:
        self.leave_note(loaded.columns() if loaded else NO_COLUMNS)

    def settle(self, loaded: Table, epoch: Epoch) -> None:
        self.catalog.sync()

    def place(self, commit: Commit, file: StagedFile) -> Place:
        if self.sink.config.upserts:
            return changes_of(self.path, commit.epoch.pipeline) / file.path
        return data_file(self.path, file.path)

    def attempt(self, commit: Commit, loaded: Table | None) -> bool:
        with self.sink.catalog_errors(self.topic):
            if commit.applied:
                self.second.commit(commit, loaded)
                return True
            if loaded is None:
                self.create(commit.schemas())
                return False
            if fork(loaded):
                return False
            self._commit(commit, loaded)
            return True

    def tidy(self, commit: Commit) -> None:
        """Drop staged files that were rewritten, and files that dead tries have written for them."""
        stem = f"{commit.epoch.stem()}-{REWRITER.partition:05d}-"
        if self.sink.config.upserts or lists.has(self.root, commit.epoch, stem, self.topic):
            live = self.live_files(commit.epoch.pipeline)
            for place in (self.place(commit, file) for file in commit.files):
                if place.name not in live:
                    place.unlink(missing_ok=True)
            lists.sweep(self.root, commit.epoch, lambda _, place: place.name in live, stem, only=self.topic)

    def _commit(self, commit: Commit, table: Table) -> None:
        known, columns = table.columns(), self.columns_after(commit, table)
        as_data = partial(self.data_file, table, columns)
        stages = [Stage(commit.epoch, REWRITER, self.sink.targets, self.sink.spec()) for _ in range(2)]
        is_written, rewritten, changed = False, None, None
        try:
            if self.sink.config.upserts:
                if known.renewed(columns.schema):
                    raise _not_followed(self.topic, known.renewed(columns.schema))
                applying = self.second.applying(commit, table, columns)
                upsert = applying.upsert(stages[0])
                upsert.all_at_once(applying.whole(), self.sink.small_rows)
                sent = sent_columns(commit, table, self.sink.config)
                changed = applying.contents.changed(self.path, upsert.written, sent)
                files = [file for part in stages[0].finish().values() for file in part.files]
            else:
                files = _with_ids(self, commit, columns, stages[0])
            renewed = known.renewed(columns.schema) if head(table) is not None else []
            if renewed and self.branch != MAIN_BRANCH:
                raise SchemaError(
                    f"the columns {', '.join(renewed)} of {self.topic} get other types, and a branch cannot follow that alone",
                    code="PEN-4001",
                    hint="write such rows to main, or cast the columns in the route's SQL",
                )
            if renewed:
                rewritten = list(map(as_data, _rewrite(stages[1], self.topic, table.batches(), columns)))
            added = list(map(as_data, files))
            is_written = True
            keep = self.sink.config.keep_snapshots
            table.commit(commit.epoch, commit.end, columns, added, keep, rewritten, changed)
        except BaseException as error:
            may_be_committed = is_written and not isinstance(error, CommitFailedException)
            for stage in () if may_be_committed else stages:
                stage.abandon()
                lists.sweep(self.root, commit.epoch, lambda *_: False, stage.stem, only=self.topic)
            raise
        self.leave_note(table.columns())

    def columns_after(self, commit: Commit, table: Table) -> Columns:
        columns = table.columns()
        for each in commit.schemas():
            columns = wider_columns(self.topic, self.layout, columns, own_rows(self.sink.config, self.topic, each))
        return columns

    def data_file(self, table: Table, columns: Columns, file: StagedFile) -> DataFile:
        stats = read_stats(file)
        del stats["ids"]
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=str(data_file(self.path, file.path)),
            file_format=FileFormat.PARQUET,
            partition=self.layout.record(file.partition, columns.schema),
            file_size_in_bytes=file.bytes,
            sort_order_id=None,
            spec_id=table.metadata.default_spec_id,
            equality_ids=None,
            key_metadata=None,
            **stats,
        )

    def create(self, schemas: Sequence[pa.Schema]) -> None:
        columns = NO_COLUMNS
        for each in schemas:
            own = own_rows(self.sink.config, self.topic, each)
            columns = wider_columns(self.topic, self.layout, columns, own)
        schema = columns.iceberg()
        self._unseen.make_namespace()
        store.make_directory(self.path / "metadata")
        seeded = self._unseen.is_set()
        self.catalog.create_table(
            self.identifier,
            schema,
            location=str(self.path),
            partition_spec=self.layout.spec(schema),
            properties={**PROPERTIES, **({seeded_key(self.branch): "true"} if seeded else {})},
        )
        if seeded:
            self._unseen.clear()

    # -- seeding and columns ---------------------------------------------------------------------------------------

    def is_seeded(self) -> bool:
        table = self.load()
        return table.is_seeded() if table else self._unseen.is_set()

    def mark_seeded(self, now: pa.Schema | None) -> None:
        conflict: Exception | None = None
        for _ in range(loop.TRIES):
            try:
                with durable.disk_errors(), self.sink.catalog_errors(self.topic):
                    self._mark_seeded(now, self.load())
                return
            except self.conflicts as error:
                conflict = error
        raise RetryableError(f"{self.name} refused {loop.TRIES} changes: {conflict}", code="PEN-2005")

    def _mark_seeded(self, now: pa.Schema | None, table: Table | None) -> None:
        if table is None and now is not None:  # no rows came: readers find an empty table, not a missing one
            # If the table cannot hold such columns, the first row will say so.
            with contextlib.suppress(SchemaError, ValueError):
                self.create([iceberg_schema(self.topic, now)])
            table = self.load()
        if table is None:
            self._unseen.set()
        elif not table.is_seeded():
            table.mark_seeded()

    def schema(self) -> pa.Schema | None:
        table = self.load()
        return table and iceberg_schema(self.topic, table.columns().schema)

    def live_files(self, pipeline: str) -> set[str]:
        table = self.load()
        return table.live_files(self._live) if table else set()

    def leave_note(self, columns: Columns) -> None:
        """Write the table's columns down for the tasks of the next epoch, so that they need not ask the catalog."""
        text = columns.to_json()
        if (
            self._noted != text and not self.sink.is_vended
        ):  # there tasks ask the catalog for keys, and so for the columns
            path = hint_of(self.path)
            store.make_directory(path.parent)
            store.put(path, text.encode())
            self._noted = text


def _found(catalog: AnyCatalog, identifier: tuple[str, ...], name: str) -> IcebergTable | None:
    """The table that the catalog names; its newest metadata file must be there."""
    for last in (False, True):
        try:
            return catalog.load_table(identifier)
        except NoSuchTableError:
            break
        except FileNotFoundError as error:
            if last:  # at first another writer may have removed the file since the catalog was asked
                raise FatalError(
                    f"the catalog names a metadata file of {name} that is gone: the table's files were dropped, or restored "
                    "from a copy that is older than the catalog",
                    code="PEN-5010",
                    hint="restore the newest backup of both, files and catalog; or drop the table from the catalog, and read "
                    "everything again with `penstock offsets reset FILE`",
                ) from error
    return None


def _not_followed(topic: Topic, names: Sequence[str]) -> SchemaError:
    return SchemaError(
        f"the columns {', '.join(names)} of {topic} become timestamps, and upserts cannot follow that",
        code="PEN-4001",
        hint="cast them in the route's SQL, or write to another table",
    )


class SeededNote:
    """A note in the namespace that the first copy of a topic is complete; for topics without rows, which have no table."""

    def __init__(self, target: IcebergTarget) -> None:
        self._target = target
        self._namespace, name = target.identifier
        self._key = f"{SEEDED}.{hashlib.sha256(name.encode()).hexdigest()[:32]}"

    def make_namespace(self) -> None:
        with contextlib.suppress(NamespaceAlreadyExistsError, IntegrityError):  # another topic may create it just now
            self._target.catalog.create_namespace(self._namespace)

    def is_set(self) -> bool:
        with self._target.sink.catalog_errors(self._target.topic):
            try:
                properties = self._target.catalog.load_namespace_properties(self._namespace)
            except NoSuchNamespaceError:
                return False
        return properties.get(self._key) == "true"

    def set(self) -> None:
        self.make_namespace()
        self._target.catalog.update_namespace_properties(self._namespace, updates={self._key: "true"})

    def clear(self) -> None:
        self._target.catalog.update_namespace_properties(self._namespace, removals={self._key})


def hint_of(target: Place) -> Place:
    """The note of a table's columns."""
    return target / HIDDEN / ".columns"


def data_file(target: Place, path: str) -> Place:
    return target / "data" / path


def wider_columns(
    topic: Topic, layout: Layout, columns: Columns, rows: pa.Schema, policy: Policy = Policy.EVOLVE
) -> Columns:
    """
    The columns once rows of a schema are in the table.

    The commit always evolves: staged rows have passed the policy, and can only go forward.
    """
    if not len(columns.schema):
        return refuse_one_path(topic, columns.with_types(rows))
    stored = iceberg_schema(topic, columns.schema)
    wider = follow(topic, stored, rows, policy, widens)
    laid_out_by, nested = [each.column for each in layout], any(nests_structs(each.type) for each in stored)
    for name in columns.renewed(wider):
        if name in laid_out_by or nested:
            raise refusal(topic, name, stored.field(name).type, wider.field(name).type, policy, is_wider=True)
    return refuse_one_path(topic, columns.with_types(wider))


def _with_ids(target: IcebergTarget, commit: Commit, columns: Columns, stage: Stage) -> list[StagedFile]:
    """The staged files, those among them written again whose field ids are not the table's."""
    ids = dict(ids_of(columns.schema))
    # Tasks that add columns at the same time may give one id to two of them.
    mixed_up = [file for file in commit.files if not read_stats(file)["ids"].items() <= ids.items()]
    rows = _batches([target.place(commit, file) for file in mixed_up])
    files = [file for file in commit.files if file not in mixed_up]
    return files + _rewrite(stage, target.topic, rows, columns)


def _rewrite(stage: Stage, topic: Topic, batches: Iterable[pa.RecordBatch], columns: Columns) -> list[StagedFile]:
    """Write rows again with the types and the field ids of the columns; nothing of it is visible."""
    for batch in batches:
        schema = pa.schema([columns.schema.field(name) for name in batch.schema.names])
        try:
            values = [widened(each, field.type) for each, field in zip(batch.columns, schema, strict=True)]
        except pa.ArrowInvalid as error:
            raise FatalError(
                f"a value of {topic} does not fit the wider type of its column: {reason_of(error)}",
                code="PEN-5021",
                hint="a date may lie beyond the last timestamp: correct or delete its row in the table, and start again",
            ) from error
        stage.write(topic, pa.RecordBatch.from_arrays(values, schema=schema))
    return [file for part in stage.finish().values() for file in part.files]


def _batches(places: Sequence[Place]) -> Iterator[pa.RecordBatch]:
    for place in places:
        yield from pq.ParquetFile(store.source(place)).iter_batches(batch_size=ROW_GROUP_ROWS)
