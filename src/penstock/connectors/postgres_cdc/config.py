"""The options of the connectors that read PostgreSQL's log."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from penstock.connectors.postgresql.config import PostgresConfig


class PostgresLogConfig(PostgresConfig):
    """Which log is read, and how."""

    identity: ClassVar[frozenset[str]] = frozenset({"tables", "slot"})

    tables: Annotated[tuple[str, ...], Field(min_length=1)]
    """
    Tables to mirror, as `schema.table`; `*` matches any characters. Partitions are captured through their root table.
    TRUNCATE, ATTACH, DETACH and DROP of a single partition do not appear in the log; `postgres_cdc` notices them and copies
    the table again. Unlogged tables, and tables without a replica identity, cannot be captured: `penstock check` lists them.
    """

    exclude_tables: tuple[str, ...] = ()
    """Tables to leave out, by the same patterns."""

    exclude_columns: tuple[str, ...] = ()
    """
    Columns to leave out, as `schema.table.column` with `*`; columns of a key cannot be left out. If a column is excluded
    later, the target keeps the values that it has. If it is included again, `postgres_cdc` copies its values. Generated
    columns that the server does not publish are always left out: virtual ones, and before PostgreSQL 18 stored ones.
    """

    text_columns: tuple[str, ...] = ()
    """
    Columns whose values are captured as the server prints them, by the same patterns. Use it for values that the Arrow type
    has no place for: NaN in numeric(p, s), arrays of two dimensions, arrays whose subscripts do not start at 1 (`[0:1]={7,8}`),
    timestamps after the year 294246; and for arrays in a key. Without it such a value sets its table aside with an error.
    If you name a column later, its table is copied again, provided that the target can take other types.
    """

    insert_only: tuple[str, ...] = ()
    """
    Tables of which only inserts (and TRUNCATE) are captured; this way a table needs no replica identity. With
    `postgres_cdc` a table that you add later keeps its rows, and one that you remove is copied again.
    """

    slot: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,63}$")] = "penstock"
    """The replication slot; each pipeline needs one of its own."""

    publication: Annotated[str, Field(min_length=1, max_length=50)] = "penstock"
    """The publication of the tables; `…_inserts` is used for `insert_only`, `…_truncates` for partitioned tables."""

    manage: bool = True
    """
    Make the slot and the publication, add new tables to it, and alter a publication that leaves changes out (by its options,
    row filters or column lists). With false they are only verified, and tables with unpublished changes are set aside.
    """

    max_wal_bytes: PositiveInt = 256 << 20
    """Most log that is read at a time; a transaction is never cut, however large it is."""

    heartbeat_secs: PositiveFloat = 10.0
    """Log without any changes is acknowledged after this time, so that the server can discard it."""

    visible_timeout_secs: PositiveFloat = 60.0
    """While tables are copied: how long a committed transaction may stay invisible (a synchronous standby is missing)."""

    decoding_memory_bytes: PositiveInt = 256 << 20
    """Memory in which the server assembles transactions (`logical_decoding_work_mem`) before it spills them to disk."""

    def session(self) -> dict[str, str]:
        """With `row_security` off a policy that hides rows from the copy is an error; the log holds all rows."""
        return {**super().session(), "row_security": "off"}

    @property
    def follows_partitions(self) -> bool:
        """True if changes of whole partitions are followed, for which the publication of truncates is needed."""
        return False


class PostgresCdcConfig(PostgresLogConfig):
    snapshot: Literal["initial", "when_needed", "always", "never"] = "initial"
    """
    When tables are copied: once, before their changes (`initial`); also after the slot was lost (`when_needed`); after that
    and at every start (`always`); or not at all (`never`). If the slot already exists at the first start, tables that every
    sink calls seeded are not copied. A second copy clears the target together with its own first rows. A copy that is needed
    because a column got a default or another type overwrites the rows in place and clears nothing.
    """

    detached_rows: Literal["remove", "keep"] = "remove"
    """
    What happens to the rows of a partition after DETACH or DROP. `remove`: the table is copied again, so that they leave the
    target. `keep`: they stay until the next copy that clears the target (`resync`, or TRUNCATE of one partition). ATTACH and
    TRUNCATE of a partition are always followed by a copy. New empty partitions and rewritten partitions need none.
    """

    seed_chunk_rows: PositiveInt | None = None
    """
    Rows that one task copies in one epoch; after a crash the rows of an uncommitted epoch are copied again. The default is
    one million, growing to four million while an epoch takes less than 5 s, since the log waits for that long.
    """

    @property
    def follows_partitions(self) -> bool:
        return self.snapshot != "never"
