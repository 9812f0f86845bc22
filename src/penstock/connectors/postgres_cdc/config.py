"""The options of what reads PostgreSQL's log."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from penstock.connectors.postgresql.config import PostgresConfig


class PostgresLogConfig(PostgresConfig):
    """Whose log is read, and how: what every reader of it has to know."""

    identity: ClassVar[frozenset[str]] = frozenset({"tables", "slot"})

    tables: Annotated[tuple[str, ...], Field(min_length=1)]
    """
    Tables to mirror, as `schema.table`; `*` stands for anything. Partitions come with their root; that one was truncated,
    attached, detached or dropped as a whole is not in its log, and only `postgres_cdc` follows it, by copying the table.
    """

    exclude_tables: tuple[str, ...] = ()
    """Tables to leave out of those, by the same patterns."""

    exclude_columns: tuple[str, ...] = ()
    """
    Columns to leave out, as `schema.table.column` with `*`; not those of a key. One that is left out later stays in the
    target as it is; of one that is left out no more, `postgres_cdc` copies the values.
    """

    text_columns: tuple[str, ...] = ()
    """
    Columns whose values are brought as the server prints them, by the same patterns: the way to take in what their types
    have no place for (NaN in numeric(p, s), arrays of two dimensions, timestamps behind the year 294246), and arrays as
    keys. A table whose columns are named later is copied anew, if its target can take other types.
    """

    insert_only: tuple[str, ...] = ()
    """
    Tables of which only inserts (and TRUNCATE) are captured: the way to take in those without a replica identity. With
    `postgres_cdc` one that moves in later keeps its rows, and one that moves out is copied again.
    """

    slot: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,63}$")] = "penstock"
    """The replication slot; each pipeline needs one of its own."""

    publication: Annotated[str, Field(min_length=1, max_length=50)] = "penstock"
    """The publication that names the tables; `…_inserts` is used with `insert_only`, `…_truncates` with partitioned tables."""

    manage: bool = True
    """
    Make the slot and the publication, add new tables to it, and alter one that leaves changes out (options, row filters,
    column lists); false: only verify that they are there, and set tables aside whose changes are not published.
    """

    max_wal_bytes: PositiveInt = 256 << 20
    """Most log that is read at a time; a transaction is never cut, however large it is."""

    heartbeat_secs: PositiveFloat = 10.0
    """After so long the log is acknowledged even if it held no changes, so that the server can let go of it."""

    visible_timeout_secs: PositiveFloat = 60.0
    """While tables are copied: how long a committed transaction may stay invisible (a synchronous standby is missing)."""

    decoding_memory_bytes: PositiveInt = 256 << 20
    """Memory in which the server puts transactions together (`logical_decoding_work_mem`) before it goes to disk."""

    def session(self) -> dict[str, str]:
        """With an error where a policy would hide rows of a table from the copy; the log holds all of them."""
        return {**super().session(), "row_security": "off"}


class PostgresCdcConfig(PostgresLogConfig):
    snapshot: Literal["initial", "when_needed", "always", "never"] = "initial"
    """
    When tables are copied: once before their changes (`initial`), also after the slot was lost (`when_needed`), then and
    at every start (`always`), or not at all (`never`). Tables that every sink calls seeded are not copied at a first start if the
    slot is already there. A copy that is not the first clears the target's rows together with its own first rows; one that
    a new default or another type of a column makes necessary goes over them and clears nothing.
    """

    detached_rows: Literal["remove", "keep"] = "remove"
    """
    Whether rows that leave with DETACH or DROP of a partition leave the target too, for which their table is copied anew,
    or stay (`keep`) until a copy that clears the target: `resync`, or TRUNCATE of one partition. ATTACH and TRUNCATE of a
    partition are always followed, by a copy as well; partitions that are made empty and partitions that are rewritten cost none.
    """

    seed_chunk_rows: PositiveInt | None = None
    """
    Rows that one task copies in one epoch; what was not committed yet is copied again after a crash. By default a million,
    and up to four while an epoch takes less than 5 s, since the log waits for so long.
    """
