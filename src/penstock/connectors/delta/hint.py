"""The columns of a table, for tasks: the client, whose threads do not survive a fork, stays on the driver."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from penstock import durable, store
from penstock.connectors.delta.client import client_options, delta_errors
from penstock.connectors.lake.targets import HIDDEN
from penstock.store import Place


class Hint:
    """
    The columns of a table, for tasks.

    On a disk they read the log. In an object store that would be many requests, so the driver leaves a note there whenever
    they change; where it has not, the client is asked. A note may be old: the commit looks again.
    """

    def __init__(self, table: Place) -> None:
        self._table = table
        self._left = ""

    def leave(self, table: DeltaTable | None) -> None:
        if isinstance(self._table, Path) or table is None:
            return
        metadata = table.metadata()
        described = {"schemaString": table.schema().to_json(), "partitionColumns": metadata.partition_columns}
        text = durable.canonical(described)
        if text != self._left:
            store.put(self._place, text.encode())
            self._left = text

    def metadata(self) -> dict[str, Any] | None:
        if isinstance(self._table, Path):
            return read_metadata(self._table / "_delta_log")
        with contextlib.suppress(FileNotFoundError):
            return dict(json.loads(self._place.read_bytes()))
        with contextlib.suppress(TableNotFoundError), delta_errors(self._table):
            found = DeltaTable(str(self._table), storage_options=client_options(self._table))
            return {
                "schemaString": found.schema().to_json(),
                "partitionColumns": found.metadata().partition_columns,
            }
        return None

    @property
    def _place(self) -> Place:
        return self._table / HIDDEN / ".columns"


_ENTRY = re.compile(r"(\d{20})\.(json|checkpoint\.parquet)")

_read: dict[Path, tuple[str, str, dict[str, Any]]] = {}
"""Per log: the newest entry that this process has read, its identity, and the metadata as of that entry."""


def read_metadata(log: Path) -> dict[str, Any] | None:
    """
    The newest metadata in a table's log, read without the client, whose threads do not survive a fork.

    None if there is no table, or if only the client can read its checkpoints: the commit then checks the rows.
    """
    seen, identity, known = _read.get(log, ("", "", None))
    if known is not None and seen.endswith(".json") and identity_of(log / seen) == identity:
        return _read_on(log, int(seen[:20]), known)
    names = sorted(os.listdir(log), reverse=True) if log.exists() else []
    entries = [match for name in names if name[:1] == "0" and (match := _ENTRY.fullmatch(name))]
    for newer, entry in zip([None, *entries], entries, strict=False):
        if newer is not None and int(entry[1]) < int(newer[1]) - 1:
            return None  # entries are missing that only a checkpoint of another kind holds
        path = log / entry[0]
        metadata = known if entry[0] == seen and identity_of(path) == identity else _metadata_in(path)
        if metadata is not None:
            newest = identity_of(log / entries[0][0])
            if newest:
                _read[log] = (entries[0][0], newest, metadata)
            return metadata
    return None


def _read_on(log: Path, version: int, metadata: dict[str, Any]) -> dict[str, Any]:
    """The newest metadata, given the metadata as of a version: listing a long log would be slow."""
    while (entry := log / f"{version + 1:020d}.json").exists():
        metadata = _metadata_in(entry) or metadata
        version += 1
    newest = log / f"{version:020d}.json"
    identity = identity_of(newest)
    if identity:
        _read[log] = (newest.name, identity, metadata)
    return metadata


def _metadata_in(entry: Path) -> dict[str, Any] | None:
    try:
        if entry.suffix == ".json":
            lines = entry.read_bytes().splitlines()
            actions = [json.loads(line) for line in lines if b'"metaData"' in line]
        else:
            actions = pq.read_table(entry, columns=["metaData"]).drop_null().to_pylist()
    except FileNotFoundError:
        return None  # another writer has just cleaned up the log
    return next((dict(action["metaData"]) for action in actions if action.get("metaData")), None)


def identity_of(path: Place) -> str:
    """Distinguishes a file from a later one with the same name; empty if there is none."""
    found = store.head(path)
    return found.etag if found else ""
