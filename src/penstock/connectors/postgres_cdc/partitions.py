"""The partitions of a captured root: what happens to a whole partition does not appear in the log, and is noticed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import psycopg
from pydantic import BaseModel, ConfigDict

from penstock.connectors.postgres_cdc.log import read, slot

_MOST_NAMED = 3


class Tree(BaseModel):
    """The partitions of a root as they were when last seen; part of the position."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    published: int = 0
    """The root's entry in the publication of truncates; 0: it had none, or not for all of its log."""
    parts: dict[int, tuple[int, int]] = {}
    """Every table below the root: the transaction that made it a partition, and its file (0 if it has partitions itself)."""
    logged: tuple[int, ...] = ()
    """Partitions that only the log has shown: they came after one look at the catalog, and may be gone before the next."""
    left: dict[int, int] = {}
    """Partitions that are gone, and the place up to which the log may still show them."""

    def shown(self, oids: Iterable[int]) -> Tree:
        """The tree with partitions that the log has shown."""
        new = [oid for oid in oids if oid not in self.parts and oid not in self.left]
        return self.model_copy(update={"logged": tuple(sorted({*self.logged, *new}))}) if new else self


@dataclass(frozen=True)
class Part:
    """A table below a root, as the catalog shows it; `made`: it was created as a partition, not attached later."""

    oid: int
    parent: int
    link: int
    file: int
    made: bool
    name: str


@dataclass(frozen=True)
class PartitionsNow:
    """A root's partitions now, each after its parent; `locked`: a session holds an exclusive lock on it, or waits for one."""

    published: int
    parts: Sequence[Part]
    locked: frozenset[int]

    def tree(self, before: Tree | None = None, unsure: Mapping[int, int] | None = None, log: Log | None = None) -> Tree:
        """The tree to remember; for the `unsure` partitions with their earlier file."""
        parts = {part.oid: (part.link, (unsure or {}).get(part.oid, part.file)) for part in self.parts}
        published, left = self.published, {}
        if self.locked and (before is None or before.published != published):
            published = 0  # a truncate from before the publication may still become visible
        if before is not None and log is not None:
            left = {oid: place for oid, place in before.left.items() if place > log.start}
            left |= {oid: log.place for oid in (*before.parts, *before.logged) if oid not in parts}
        return Tree(published=published, parts=parts, left=left)


@dataclass(frozen=True)
class Difference:
    """The differences between two looks at the partitions that hold rows."""

    gone: list[int] = field(default_factory=list)
    attached: list[Part] = field(default_factory=list)
    back: list[Part] = field(default_factory=list)
    """Detached and attached again; changes in between are not in the log."""
    new: set[int] = field(default_factory=set)
    moved: dict[int, int] = field(default_factory=dict)
    """Partitions with another file, so truncated or rewritten, and their earlier file."""


def difference(before: Tree, now: PartitionsNow) -> Difference:
    found = Difference()
    comes: dict[int, Literal["", "made", "attached"]] = {}
    for part in now.parts:
        above, known = comes.get(part.parent, ""), before.parts.get(part.oid)
        if above == "attached" or (known[0] != part.link if known else not part.made):
            comes[part.oid] = "attached"
        else:
            comes[part.oid] = "" if known else "made"
        if not part.file:
            continue
        if comes[part.oid] == "attached":
            (found.back if known else found.attached).append(part)
        if not known:
            found.new.add(part.oid)
        file = known[1] if known else part.oid  # it begins with that one
        if part.file != file:
            found.moved[part.oid] = file
    held = [*(oid for oid, (_, file) in before.parts.items() if file), *before.logged]
    found.gone.extend(oid for oid in held if oid not in comes)
    return found


def look(connection: psycopg.Connection[Any], publication: str, roots: Sequence[int]) -> dict[int, PartitionsNow]:
    """The partitions of some roots; waits for no lock."""
    # Before the rest: a truncate that is in the log and not yet visible still has its lock.
    locked = {oid for (oid,) in connection.execute(_LOCKED).fetchall()}
    published = dict(connection.execute(_PUBLISHED, [publication, list(roots)]).fetchall())
    parts: dict[int, list[Part]] = {root: [] for root in roots}
    for root, *values in connection.execute(_PARTS, [list(roots)]).fetchall():
        parts[root].append(Part(*values))
    return {
        root: PartitionsNow(published.get(root, 0), found, frozenset(part.oid for part in found if part.oid in locked))
        for root, found in parts.items()
    }


@dataclass
class Log:
    """The slot's log from `start` to `end` (None: the end of the log now), asked for truncates only if it matters."""

    connection: psycopg.Connection[Any]
    slot: str
    publication: str
    others: Sequence[str]
    """The publications that show a truncate of the root, but none of its partitions."""
    start: int
    end: int | None

    @cached_property
    def place(self) -> int:
        """The end of the log at the first call: after everything that was visible before it."""
        return slot.inserted(self.connection)

    def truncated(self, root: int, moved: Collection[int], others: Collection[int]) -> set[int]:
        """The partitions that were truncated without their root; if the log cannot tell, the ones with another file."""
        asked = {*moved, *others}
        try:
            found = [(xid, part) for xid, part in self._parts if part in asked] if asked else []
        except psycopg.errors.UndefinedObject:  # before version 18: some of the log is from before the publication
            return {*moved}
        return {part for xid, part in found if self._parts[xid, part] > self._roots[xid, root]}

    @cached_property
    def _parts(self) -> Counter[tuple[int, int]]:
        return self._truncates([self.publication])

    @cached_property
    def _roots(self) -> Counter[tuple[int, int]]:
        return self._truncates(self.others)

    def _truncates(self, publications: Sequence[str]) -> Counter[tuple[int, int]]:
        return read.truncates(self.connection, self.slot, publications, self.start, self.end or self.place)


def named(names: Iterable[str], what: str) -> str:
    """`the partition a was …`, `the partitions a, b, c and 4 more were …`."""
    known = sorted(names)
    text = ", ".join(known[:_MOST_NAMED]) + (
        f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    )
    return f"the partition {text} was {what}" if len(known) == 1 else f"the partitions {text} were {what}"


# ATTACH rewrites pg_attribute rows, so a partition whose attributes date from its own creation was never a standalone table.
# `cmin` is only reliable while `xmax` is 0.
_PARTS = """
    WITH RECURSIVE below AS (
        SELECT inhparent AS root, inhparent, inhrelid, xmin, xmax, cmin, 1 AS depth
          FROM pg_inherits WHERE inhparent = ANY(%s::oid[]) AND NOT inhdetachpending
        UNION ALL
        SELECT b.root, i.inhparent, i.inhrelid, i.xmin, i.xmax, i.cmin, depth + 1
          FROM below b JOIN pg_inherits i ON i.inhparent = b.inhrelid AND NOT i.inhdetachpending)
    SELECT b.root::int8, b.inhrelid::int8, b.inhparent::int8, b.xmin::text::int8, c.relfilenode::int8,
           b.xmax::text = '0' AND EXISTS (
               SELECT FROM pg_attribute a
                WHERE a.attrelid = b.inhrelid AND a.attnum > 0 AND NOT a.attisdropped AND a.xmax::text = '0'
                  AND a.xmin = b.xmin AND a.cmin::text::int8 < b.cmin::text::int8),
           quote_ident(n.nspname) || '.' || quote_ident(c.relname)
      FROM below b JOIN pg_class c ON c.oid = b.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.relkind IN ('r', 'p')
     ORDER BY b.depth"""

_LOCKED = """
    SELECT relation::int8 FROM pg_locks WHERE locktype = 'relation' AND mode = 'AccessExclusiveLock'
       AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""

_PUBLISHED = """
    SELECT r.prrelid::int8, r.oid::int8 FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
     WHERE p.pubname = %s AND p.pubtruncate AND NOT p.pubviaroot AND r.prrelid = ANY(%s::oid[])"""
