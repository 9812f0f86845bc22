"""Decode pgoutput messages (protocol 1, text) in bulk: Arrow in, Arrow out, no Python per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.connectors.postgres_cdc.types import Column, TypeCatalog


@dataclass(frozen=True)
class Relation:
    """A table as a RELATION message (or the catalog) describes it."""

    oid: int
    namespace: str
    name: str
    replica_identity: str
    """`d` default, `f` full, `i` index, `n` nothing."""
    columns: tuple[Column, ...]

    @property
    def stream(self) -> str:
        return f"{self.namespace}.{self.name}"

    def key(self, configured: Sequence[str] = ()) -> tuple[str, ...]:
        """The columns that tell rows apart: the replica identity's, or the primary key that the caller knows (full, nothing)."""
        raise NotImplementedError


@dataclass(frozen=True)
class RelationChange:
    """A table was seen for the first time (`old` is None) or looks different; comes before its first rows that do."""

    old: Relation | None
    new: Relation
    position: str
    """`_position` of the first change that follows it."""


@dataclass(frozen=True)
class Rows:
    """Changes of one table in commit order: its columns, then `CHANGE_FIELDS`; a TRUNCATE is a row with `_op` `t`."""

    relation: Relation
    batch: pa.RecordBatch


Decoded = RelationChange | Rows


class Decoder:
    """
    Decodes one WAL range, chunk by chunk; picklable between two calls of `feed`.

    Transactions with `start_lsn <= commit_lsn < end_lsn` count, `commit_lsn` being BEGIN's final LSN; others are skipped.
    """

    def __init__(
        self,
        catalog: TypeCatalog,
        start_lsn: int,
        end_lsn: int,
        *,
        wanted: Callable[[str], bool] | None = None,
        exclude: Callable[[str, str], bool] | None = None,
        keys: Mapping[str, Sequence[str]] | None = None,
        relations: Mapping[int, Relation] | None = None,
        current_xid: int | None = None,
    ) -> None:
        """
        `wanted(stream)` chooses tables, `exclude(stream, column)` leaves columns out, `keys` are the primary keys of
        tables whose replica identity does not name them (full, nothing), `relations` is what an earlier range knew of
        each table (for `RelationChange.old`), `current_xid` a 64-bit `pg_current_xact_id()` that widens `_txid`.
        """
        self.last_commit_lsn: int | None = None
        """BEGIN's final LSN of the last transaction in the range."""
        self.past_end = False
        """A transaction at or behind `end_lsn` was seen: nothing that follows belongs to the range."""
        self.relations: dict[int, Relation] = dict(relations or {})
        """What the rows so far looked like, by oid; for the next range."""

    @property
    def xids(self) -> np.ndarray:
        """The transactions of the range that were decoded, widened if `current_xid` is known; int64."""
        raise NotImplementedError

    def feed(self, messages: pa.Table | pa.RecordBatch) -> Iterator[Decoded]:
        """Decode a chunk of `(lsn, xid, data)`; the iterator must be read to its end before the next call."""
        raise NotImplementedError

    def finish(self) -> None:
        """Raises if the messages ended inside a transaction."""
        raise NotImplementedError


def lsn_int(text: str) -> int:
    """`16/B374D848` as an integer."""
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) | int(low, 16)


def lsn_text(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def position_text(lsn: int, sequence: int) -> str:
    """`_position` of the change with that number in the transaction that committed at `lsn`; sorts as text."""
    return f"{lsn:016X}.{sequence:010X}"
