"""The partitions of a captured root: what happens to one of them as a whole is not in the root's log, and shows only here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import psycopg
from pydantic import BaseModel, ConfigDict

from penstock.connectors.postgres_cdc import wal

_MOST_NAMED = 3


class Tree(BaseModel):
    """The partitions of a root as they were when last seen; part of the position."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    published: int = 0
    """The entry by which the publication of truncates names the root; 0: it did not, or not for all of its log."""
    parts: dict[int, tuple[int, int]] = {}
    """Every table below the root: the transaction that made it a partition, and its file; 0: it has partitions itself."""
    logged: tuple[int, ...] = ()
    """Those that only the log has shown: they came behind one look, and may be gone before the next."""
    left: dict[int, int] = {}
    """Those that are gone, and the place up to which the log may show them."""

    def shown(self, oids: Iterable[int]) -> Tree:
        """With what the log has shown."""
        new = [oid for oid in oids if oid not in self.parts and oid not in self.left]
        return self.model_copy(update={"logged": tuple(sorted({*self.logged, *new}))}) if new else self


@dataclass(frozen=True)
class Part:
    """A table below a root, as the catalog shows it; `made`: it was a partition from the first, and nobody's table before."""

    oid: int
    parent: int
    link: int
    file: int
    made: bool
    name: str


@dataclass(frozen=True)
class Seen:
    """A root's partitions now, each behind its parent; `locked`: a session has one for itself, or waits for that."""

    published: int
    parts: Sequence[Part]
    locked: frozenset[int]

    def tree(self, before: Tree | None = None, unsure: Mapping[int, int] | None = None, log: Log | None = None) -> Tree:
        """What is remembered of it; of those that are `unsure` the file of before."""
        parts = {part.oid: (part.link, (unsure or {}).get(part.oid, part.file)) for part in self.parts}
        published, left = self.published, {}
        if self.locked and (before is None or before.published != published):
            published = 0  # a truncate of before the publication may become visible yet
        if before is not None and log is not None:
            left = {oid: place for oid, place in before.left.items() if place > log.start}
            left |= {oid: log.place for oid in (*before.parts, *before.logged) if oid not in parts}
        return Tree(published=published, parts=parts, left=left)


@dataclass(frozen=True)
class Difference:
    """What happened to the partitions that hold rows."""

    gone: list[int] = field(default_factory=list)
    attached: list[Part] = field(default_factory=list)
    back: list[Part] = field(default_factory=list)
    """Detached and attached again; whatever was done to them in between is not in the log."""
    new: set[int] = field(default_factory=set)
    moved: dict[int, int] = field(default_factory=dict)
    """Those with another file, by which they were truncated or rewritten, and the file of before."""


def difference(before: Tree, now: Seen) -> Difference:
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


def look(connection: psycopg.Connection[Any], publication: str, roots: Sequence[int]) -> dict[int, Seen]:
    """The partitions of some roots; waits for nobody's lock."""
    # Before the rest: a truncate that is in the log and not yet visible still has its lock.
    locked = {oid for (oid,) in connection.execute(_LOCKED).fetchall()}
    published = dict(connection.execute(_PUBLISHED, [publication, list(roots)]).fetchall())
    parts: dict[int, list[Part]] = {root: [] for root in roots}
    for root, *values in connection.execute(_PARTS, [list(roots)]).fetchall():
        parts[root].append(Part(*values))
    return {
        root: Seen(published.get(root, 0), found, frozenset(part.oid for part in found if part.oid in locked))
        for root, found in parts.items()
    }


@dataclass
class Log:
    """What the slot holds from `start` to `end` (None: to where the log ends now); asked for only if something depends on it."""

    connection: psycopg.Connection[Any]
    slot: str
    publication: str
    others: Sequence[str]
    """The publications that show a truncate of the root, and none of its partitions."""
    start: int
    end: int | None

    @cached_property
    def place(self) -> int:
        """Where the log ends now: behind everything that was visible before this was asked for first."""
        return wal.inserted(self.connection)

    def truncated(self, root: int, moved: Collection[int], others: Collection[int]) -> set[int]:
        """Those that were truncated without their root; if nobody can tell, those that have another file."""
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
        return wal.truncates(self.connection, self.slot, publications, self.start, self.end or self.place)


def named(names: Iterable[str], what: str) -> str:
    """`the partition a was …`, `the partitions a, b, c and 4 more were …`."""
    known = sorted(names)
    text = ", ".join(known[:_MOST_NAMED]) + (
        f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    )
    return f"the partition {text} was {what}" if len(known) == 1 else f"the partitions {text} were {what}"


# A table that was one before it was attached has had each of its columns written anew by that. `cmin` is what it seems only
# as long as nobody has tried to change the row.
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
