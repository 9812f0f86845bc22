"""A Delta table on a local disk: its log, the markers in it, and making both durable."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, TableFeatures, Transaction
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction
from pyarrow import types
from pydantic import ValidationError

from penstock import durable, failpoints, store
from penstock.connectors.delta.entries import VECTORS, Action, Entries, Marked, described, gone, with_vectors
from penstock.connectors.delta.hint import identity_of
from penstock.connectors.delta.vectors import Vector
from penstock.connectors.lake.staging import StagedFile
from penstock.connectors.lake.targets import HIDDEN, Targets
from penstock.errors import ConfigError, FatalError, SchemaError
from penstock.sink import CommittedEpoch, Epoch, Positions, Topic
from penstock.store import Place

_FEATURES = {
    *("appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns", "identityColumns"),
    *("columnMapping", "timestampNtz", VECTORS, "v2Checkpoint", "variantType"),
}
"""Table features that the client can commit to. Rules that some of them add are checked one by one."""

_NO_REWRITE = ("delta.appendOnly", "delta.enableChangeDataFeed")
"""Settings of tables whose files cannot simply be rewritten."""

_CHECKPOINT_EVERY = 100
"""Entries from one checkpoint to the next where a table does not say it; the client's own default."""

_NO_RETRIES = 0
"""A retry by the client would commit on top of a version whose marker was not read."""


class Sidecar(CommittedEpoch):
    """The marker next to the log, which has no room for `end`; the log's transactions say which sidecar counts."""

    version: int
    """Version of the table that this commit makes."""
    columns: tuple[str, ...] = ()
    """Every column that the topic ever had, for `upsert`. Other columns of the table belong to somebody else."""


@dataclass
class Table:
    """A Delta table on a local disk, and how far its log is known to be on it."""

    path: Place
    delta: DeltaTable
    markers: dict[str, tuple[int, Sidecar]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.version = self.delta.version()
        """The loaded version. The client may be at an earlier one: it does not read plain rows that we add."""
        self.took: frozenset[str] | None = None
        """If the version is one of ours that added rows: the columns of those, packed. None: it is not known to be."""
        self._columns: tuple[int, pa.Schema] | None = None
        self._synced = self.version - 1
        self._seen = self._newest()
        # Checkpoints at the table's interval. On a disk old entries stay until the checkpoint is known to be there.
        self.hooks = PostCommitHookProperties(
            create_checkpoint=True, cleanup_expired_logs=not store.is_local(self.path)
        )
        self._entries = Entries(self.path / "_delta_log")
        configured = self.delta.metadata().configuration
        self._checkpoint_every = int(configured.get("delta.checkpointInterval", _CHECKPOINT_EVERY))

    def is_the_same(self) -> bool:
        """False if the table was dropped, or dropped and created again: the client would go on with the old one."""
        return bool(self._seen) and self._newest() == self._seen

    def is_newest(self) -> bool:
        """True if nobody has made a version after the loaded one. In this order: a log is cleaned up from its old end on."""
        return not identity_of(_entry(self.path, self.version + 1)) and self.is_the_same()

    def refresh(self) -> None:
        self.delta.update_incremental()
        self.version, self.took = self.delta.version(), None
        self._seen = self._newest()

    def columns(self) -> pa.Schema:
        version = self.delta.version()
        if self._columns is None or self._columns[0] != version:
            self._columns = version, pa.schema(self.delta.schema().to_arrow())
        return self._columns[1]

    def partition_by(self) -> list[str]:
        return list(self.delta.metadata().partition_columns)

    def marker(self, pipeline: str) -> Sidecar | None:
        """The sidecar that the newest transaction of the pipeline names."""
        sequence = _sequence(self, pipeline)
        known = self.markers.get(pipeline)
        if known is not None and known[0] == sequence:
            return known[1]
        if sequence is None:
            if max(_sidecars(self._hidden(pipeline)), default=1) > 1:
                raise FatalError(
                    f"the log of {self.path} no longer holds the transactions of {pipeline}, but epochs were committed",
                    code="PEN-5020",
                    hint="somebody removed them from the log: restore the table from a backup, or write to a new one",
                )
            return None
        tried = self.delta.transaction_version(_app_of_try(pipeline))
        for name in _sidecars(self._hidden(pipeline)).get(sequence, ()):
            if tried is not None and name != _sidecar_name(sequence, tried):
                continue  # of a try that lost the race for this commit, or died before it
            with contextlib.suppress(FileNotFoundError):
                sidecar = _load(self._hidden(pipeline) / name)
                if self.delta.transaction_version(_app(pipeline, sidecar.incarnation)) == sidecar.number:
                    self.markers[pipeline] = (sequence, sidecar)
                    return sidecar
        self.refresh()
        if self.delta.transaction_version(_app(pipeline)) != sequence:
            return self.marker(pipeline)  # another process has committed, and dropped the old sidecar
        raise FatalError(
            f"{self._hidden(pipeline)} lacks the file of commit {sequence}, which records the source positions",
            code="PEN-5020",
            hint="restore the directory from a backup, or write to a new table",
        )

    def commit(
        self,
        epoch: Epoch,
        end: Positions,
        files: Sequence[StagedFile],
        removed: Sequence[StagedFile] = (),
        columns: Sequence[str] = (),
        schema: pa.Schema | None = None,
        marked: Sequence[Marked] = (),
    ) -> None:
        """Make the version after the one that is loaded, or raise `CommitFailedError`; a new `schema` drops all old files."""
        version = self.version + 1
        sequence = (_sequence(self, epoch.pipeline) or 0) + 1
        sidecar = Sidecar(
            incarnation=epoch.incarnation, number=epoch.number, end=dict(end), version=version, columns=tuple(columns)
        )
        hidden = self._hidden(epoch.pipeline)
        if not self.markers:
            store.make_directory(hidden)
        store.put(
            hidden / _sidecar_name(sequence, _try_number(epoch)),
            durable.canonical(sidecar.model_dump(mode="json")).encode(),
        )
        if not self.markers:
            store.sync([hidden, hidden.parent])  # the process that made them may have died before its fsync
        info = {"penstock": {"pipeline": epoch.pipeline, "epoch": epoch.number}}
        failpoints.hit("commit.before")
        markers = transactions(epoch, sequence)
        actions: list[Action] = [{"txn": {"appId": name, "version": number}} for name, number in markers]
        if schema is None and not marked and not (removed and self.has_vectors()):
            self._replace([*actions, *gone(removed), *self._entries.changes(files, (), ())], info, merges=bool(removed))
        elif self.has_vectors():
            if schema is not None:
                renewed = DeltaSchema.from_arrow(schema).to_json()
                actions.append({"metaData": {**described(self.delta), "schemaString": renewed}})
            left = [file.path for file in removed] if schema is None else list(self.entries.adds)
            actions += self.entries.changes(files, left, marked)
            self.publish(actions, {"operation": "MERGE", **info})
        else:
            _write(self.delta, self.hooks, files, markers, info, schema)
        self.sync(version)
        self.markers[epoch.pipeline] = (sequence, sidecar)
        sidecars = _sidecars(hidden).items()
        # One more is kept for readers of the previous version.
        store.delete(hidden / name for old, names in sidecars if old < sequence - 1 for name in names)

    def replace(self, files: Sequence[StagedFile], removed: Sequence[StagedFile]) -> None:
        """
        Make the next version of the same rows in other files, or raise `FileExistsError`.

        It writes the metadata again. The client sees no conflict in files that were only joined: a compaction or delete that
        another writer has begun before would go through, and double their rows. By the metadata it is refused.
        """
        left = (
            self.entries.changes([], [file.path for file in removed], [], data_change=False)
            if self.has_vectors()
            else gone(removed, data_change=False)
        )
        added = self._entries.changes(files, [], [], data_change=False)
        info = {"operation": "OPTIMIZE", "penstock": {"joined": len(removed)}}
        self.publish([{"metaData": described(self.delta)}, *left, *added], info)
        self.sync(self.delta.version())

    def _replace(self, actions: Iterable[Action], info: Action, merges: bool) -> None:
        """
        Make the next version by an entry that adds files and removes whole ones, or raise `FileExistsError`.

        The client takes a millisecond of CPU to write one, and need not read it before it is asked for the files.
        """
        version = self.version + 1
        operation = (
            {"operation": "MERGE"} if merges else {"operation": "WRITE", "operationParameters": {"mode": "Append"}}
        )
        self._entries.publish(version, actions, {**operation, **info})
        self.version = version
        self._seen = self._newest()
        if self._synced == version - 1 and version % self._checkpoint_every:
            self._synced = version  # a published entry is on disk
        self._make_checkpoint(version)

    def publish(self, actions: Iterable[Action], info: Action) -> None:
        """Make the next version by an entry of our own, or raise `FileExistsError`."""
        version = self.delta.version() + 1
        self._entries.publish(version, actions, info)
        self.refresh()
        self._make_checkpoint(version)

    def _make_checkpoint(self, version: int) -> None:
        """After an entry of our own, if it is time for one; after its own entries the client does it."""
        if version % self._checkpoint_every:
            return
        self.refresh()
        with contextlib.suppress(DeltaError):  # a later one does it
            self.delta.create_checkpoint()
            if self.has_vectors():
                self.entries.thin(self.delta.version())
            if not store.is_local(self.path):  # on a disk once the checkpoint is synced
                _drop_old_entries(self.delta)

    @property
    def entries(self) -> Entries:
        """The log of the loaded version as we read it ourselves."""
        self._entries.follow(self.delta.version())
        return self._entries

    def has_vectors(self) -> bool:
        """True if rows of its files may be marked as deleted; entries of such a table are our own."""
        return VECTORS in (self.delta.protocol().writer_features or ())

    def add_columns(self, columns: pa.Schema) -> None:
        self.delta.alter.add_columns(
            list(DeltaSchema.from_arrow(columns).fields),
            commit_properties=CommitProperties(max_commit_retries=_NO_RETRIES),
            post_commithook_properties=self.hooks,
        )
        self.refresh()
        self.sync(self.delta.version())

    def may_hold(self, schemas: Sequence[pa.Schema]) -> bool:
        """False if a feature for such types had to be added to the table first, and its marker must be read again."""
        features = self.delta.protocol().writer_features or ()
        kinds = [each.type for schema in schemas for each in schema]
        if "timestampNtz" in features or not any(types.is_timestamp(kind) and kind.tz is None for kind in kinds):
            return True
        self.delta.alter.add_feature(
            TableFeatures.TimestampWithoutTimezone,
            allow_protocol_versions_increase=True,
            commit_properties=CommitProperties(max_commit_retries=_NO_RETRIES),
            post_commithook_properties=self.hooks,
        )
        self.refresh()
        return False

    def widen_columns(self, columns: pa.Schema) -> None:
        """
        Give columns wider types. Only the metadata changes: readers widen the values of narrower files.

        The client has no call for it. The entry appears as the client's own do: whole, or not at all.
        """
        self.may_hold([columns])
        self.publish(
            [{"metaData": {**described(self.delta), "schemaString": retyped(self.delta, columns)}}],
            {"operation": "CHANGE COLUMNS", "operationParameters": {"columns": json.dumps(columns.names)}},
        )
        self.sync(self.delta.version())

    def sync(self, version: int) -> None:
        """Sync every entry of the log up to `version` that is not known to be, and the checkpoint made with it."""
        if not isinstance(self.path, Path):
            return  # an answer of the store means durable, and the client drops old entries itself
        versions = range(min(self._synced + 1, version), max(self.version, version) + 1)
        if not versions or versions[-1] <= self._synced:
            return
        names = [f"{v:020d}.json" for v in versions] + [f"{v:020d}.checkpoint.parquet" for v in versions]
        log = self.path / "_delta_log"
        found = [path for name in names if (path := log / name).exists()]
        if any(path.suffix == ".parquet" for path in found):
            durable.fsync(*found, log / "_last_checkpoint")
            _drop_old_entries(self.delta)
        else:
            durable.fsync(*found)
        self._synced = versions[-1]

    def _hidden(self, pipeline: str) -> Place:
        return self.path / HIDDEN / quote(pipeline, safe="")

    def _newest(self) -> str:
        return identity_of(_entry(self.path, self.version))


def is_read(table: Table) -> bool:
    """True if the client has read every version; asked after `is_the_same`. It takes milliseconds to find out itself."""
    return table.delta.version() == table.version and not identity_of(_entry(table.path, table.version + 1))


def _drop_old_entries(delta: DeltaTable) -> None:
    """Drop entries older than the table's retention. The checkpoint that replaces them is on disk now."""
    if delta.metadata().configuration.get("delta.enableExpiredLogCleanup", "true") == "true":
        with contextlib.suppress(DeltaError):  # a later checkpoint does it
            delta.cleanup_metadata()


def _sidecars(hidden: Place) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name in store.names(hidden):
        if name[:1].isdigit():
            found.setdefault(int(name[:12]), []).append(name)
    return found


def _entry(table: Place, version: int) -> Place:
    return table / "_delta_log" / f"{version:020d}.json"


def refuse_unsupported(table: Table, rewrites: bool) -> None:
    """Refuse tables with rules that only a full Delta writer applies: rows could break them unnoticed."""
    metadata, columns = table.delta.metadata(), table.delta.schema().fields
    rules = [feature for feature in table.delta.protocol().writer_features or () if feature not in _FEATURES]
    rules += [key for key in metadata.configuration if key.startswith("delta.constraints.")]
    rules += [key for key in ("delta.setTransactionRetentionDuration",) if key in metadata.configuration]
    if metadata.configuration.get("delta.columnMapping.mode", "none") != "none":
        rules.append("delta.columnMapping.mode")
    rules += [f"{key} of {column.name}" for column in columns for key in column.metadata if key.startswith("delta.")]
    if rewrites:
        rules += [key for key in _NO_REWRITE if metadata.configuration.get(key, "false") == "true"]
        v2 = table.has_vectors() and metadata.configuration.get("delta.checkpointPolicy", "classic") != "classic"
        rules += ["delta.checkpointPolicy"] if v2 else []
    if rules:
        raise SchemaError(
            f"the Delta table {table.path} uses features that this sink cannot honour: {', '.join(rules)}",
            code="PEN-4002",
            hint="remove them from the table with the engine that added them (DROP FEATURE, DROP CONSTRAINT, "
            "UNSET TBLPROPERTIES), or write to another table",
        )


def retyped(delta: DeltaTable, columns: pa.Schema) -> str:
    """The table's schema with other types for these columns."""
    schema = json.loads(delta.schema().to_json())
    wider = {each["name"]: each["type"] for each in json.loads(DeltaSchema.from_arrow(columns).to_json())["fields"]}
    for each in schema["fields"]:
        each["type"] = wider.get(each["name"], each["type"])
    return json.dumps(schema)


def recast(table: Table, columns: pa.Schema, files: Sequence[StagedFile]) -> None:
    """Make the next version: other types for these columns, and the rows of all files in `files` instead."""
    version, renewed = table.delta.version() + 1, retyped(table.delta, columns)
    if table.has_vectors():
        actions: list[Action] = [{"metaData": {**described(table.delta), "schemaString": renewed}}]
        actions += table.entries.changes(files, list(table.entries.adds), [])
        table.publish(actions, {"operation": "CHANGE COLUMNS"})
    else:
        info = {"penstock": {"recast": len(files)}}
        _write(table.delta, table.hooks, files, (), info, pa.schema(DeltaSchema.from_json(renewed)))
        table.refresh()
    table.sync(version)


def _write(
    delta: DeltaTable,
    hooks: PostCommitHookProperties,
    files: Sequence[StagedFile],
    markers: Iterable[tuple[str, int]],
    info: dict[str, Any],
    schema: pa.Schema,
) -> None:
    """Make the next version by the client: these files and columns instead of all that is there."""
    now = int(time.time() * 1000)
    delta.create_write_transaction(
        [AddAction(f.path, f.bytes, f.partition, now, True, f.stats or "") for f in files],
        "overwrite",
        DeltaSchema.from_arrow(schema),
        list(delta.metadata().partition_columns),
        commit_properties=CommitProperties(
            custom_metadata=info,
            max_commit_retries=_NO_RETRIES,
            app_transactions=[Transaction(name, number) for name, number in markers],
        ),
        post_commithook_properties=hooks,
    )


def replace_worn(
    table: Table, files: Sequence[StagedFile], removed: Sequence[str], vectors: Mapping[str, Vector]
) -> None:
    """
    Make the next version: the same rows in other files, of which some are deleted already; or raise `FileExistsError`.

    The entry is one that changes data: what another writer has begun before to do with these files is refused.
    """
    info = {"operation": "OPTIMIZE", "penstock": {"purged": len(removed)}}
    table.publish(table.entries.changes(files, removed, (), vectors=vectors), info)
    table.sync(table.delta.version())


def enable_vectors(table: Table) -> None:
    """Declare deletion vectors, in an entry of its own, or raise `FileExistsError`."""
    protocol, metadata = with_vectors(table.delta)
    table.publish([{"protocol": protocol}, {"metaData": metadata}], {"operation": "SET TBLPROPERTIES"})


MISREAD = re.compile(r"%[0-9A-Fa-f]{2}|\\")
"""Parts of a path that the client decodes, and so looks for another path."""


def claim(targets: Targets, topic: Topic) -> Place:
    """The topic's directory; refused if the client would look for another."""
    path = targets.claim(topic)
    if MISREAD.search(str(path)):
        raise ConfigError(
            f"the Delta client reads the %-code or backslash in {path} as another character, and would not find the table",
            code="PEN-1010",
            hint="route to another name, or choose another path",
        )
    return path


def _sequence(table: Table, pipeline: str) -> int | None:
    """The number of the pipeline's newest commit. The client reads the log again for it, unless we made its last entry."""
    known = table.markers.get(pipeline)
    if known is not None and known[1].version == table.version:
        return known[0]
    found: int | None = table.delta.transaction_version(_app(pipeline))
    return found


def transactions(epoch: Epoch, sequence: int) -> list[tuple[str, int]]:
    """
    The application transactions of one commit: how many commits the pipeline has made, which epoch this is, and which try.

    Two tries at one commit both leave a sidecar: the log says whose it took.
    """
    return [
        (_app(epoch.pipeline), sequence),
        (_app(epoch.pipeline, epoch.incarnation), epoch.number),
        (_app_of_try(epoch.pipeline), _try_number(epoch)),
    ]


def _app(pipeline: str, incarnation: str | None = None) -> str:
    name = quote(pipeline, safe="")  # no colon, which would make one pipeline's name another's incarnation
    return f"penstock:{name}" if incarnation is None else f"penstock:{name}:{incarnation}"


def _app_of_try(pipeline: str) -> str:
    return f"penstock-try:{quote(pipeline, safe='')}"


def _try_number(epoch: Epoch) -> int:
    """The name of the epoch's try, as a transaction of the log can hold it."""
    return int(epoch.attempt, 16)


def _sidecar_name(sequence: int, tried: int) -> str:
    return f"{sequence:012d}-{tried:08x}.json"


def _load(path: Place) -> Sidecar:
    try:
        return Sidecar.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise FatalError(
            f"{path} is corrupt: {error}", code="PEN-5020", hint="restore the file from a backup"
        ) from error
