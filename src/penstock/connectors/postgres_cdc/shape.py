"""
The shape of a table: what its rows looked like when they were copied, and why rows of that time may be wrong now.

Some DDL changes rows without a trace in the log: a new column with a default, another type, a renamed enum label. The
position keeps the shape of each table, and planning compares it with the catalog: `Shape.differs_from` gives the reason
why the table must be copied again, if there is one.

A shape is stored as one line, for example
`c4ca1f0e9e3b77aa:16402:5d41402a:7215ee9c:16500.2.0cc175b9:92eb5ffe,inserts:0cc175b9.92eb5ffe`:

    columns    eight digits for each column there ever was: four of its name, four of its type; `-` once it is dropped
    file       the data file of the table, or of its oldest partition
    defined    a digest of the transactions that last defined its columns
    key        a digest of its key, and of the columns that are captured as text
    types      the enums and composites in its values: oid, number of members, digest of the members
    left_out   digests of the excluded columns, and `inserts` if only inserts are captured
    keyed      two digests of the columns of the key: of their types, and of the transactions that last defined them

Shapes of early versions end after the fourth or the sixth part; they say nothing about the others.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

INSERTS = "inserts"
_DROPPED = "----"


class Reason(StrEnum):
    """Why rows that were copied in an earlier shape may be wrong now."""

    COLUMN_CHANGED = "a column has another type or name"
    COLUMN_CAME_BACK = "a column of that name was dropped and added again"
    COLUMN_FILLED = "a new column has a default or is generated"
    REWRITTEN = "the table was rewritten and its columns defined again"
    LABEL_RENAMED = "an enum label was renamed, or a composite type changed"
    COLUMN_INCLUDED = "a column is not excluded any more"
    INSERT_ONLY_CHANGED = "it was moved into or out of `insert_only`"
    KEY_CHANGED = "its key or its `text_columns` changed"


def digest(*texts: str) -> str:
    """Eight hex digits of some texts."""
    return hashlib.md5("\0".join(texts).encode(), usedforsecurity=False).hexdigest()[:8]


@dataclass(frozen=True)
class ColumnMark:
    """Four digits of a column's name and four of its type; dashes for the type, or for both, once it is dropped."""

    name: str
    kind: str

    @property
    def dropped(self) -> bool:
        return self.kind == _DROPPED


@dataclass(frozen=True)
class TypeMark:
    """An enum or composite type: how many members it had, and their digest."""

    oid: int
    count: int
    members: str


@dataclass(frozen=True)
class Shape:
    """What a table looked like at one time; see the top of this file."""

    columns: tuple[ColumnMark, ...]
    file: str
    defined: str
    key: str | None
    types: tuple[TypeMark, ...] | None = None
    left_out: tuple[str, ...] | None = None
    keyed: str | None = None

    @classmethod
    def parse(cls, text: str) -> Shape:
        """The shape that `str` wrote, of this version or an earlier one."""
        columns, *rest = text.split(":")
        marks = tuple(ColumnMark(name, kind) for name, kind in re.findall("(....)(....)", columns))
        file, defined, key, types, left_out, keyed = (*rest, *[None] * (6 - len(rest)))[:6]
        parsed = None if types is None else tuple(_type_mark(each) for each in types.split(",") if each)
        names = None if left_out is None else tuple(each for each in left_out.split(",") if each)
        return cls(marks, file or "", defined or "", key, parsed, names, keyed)

    def __str__(self) -> str:
        parts = ["".join(mark.name + mark.kind for mark in self.columns), self.file, self.defined]
        if self.key is not None:
            parts.append(self.key)
        if self.types is not None:
            parts.append(",".join(f"{each.oid}.{each.count}.{each.members}" for each in self.types))
        if self.left_out is not None:
            parts.append(",".join(self.left_out))
        if self.keyed is not None:
            parts.append(self.keyed)
        return ":".join(parts)

    @property
    def insert_only(self) -> bool:
        """True if changes other than inserts were left out."""
        return INSERTS in (self.left_out or ())


@dataclass(frozen=True)
class CurrentShape(Shape):
    """The shape of a table now, with what only the catalog knows: defaults, members of types, captured columns."""

    defaults: frozenset[int] = frozenset()
    """Numbers of the columns that have a default, or are generated."""
    members: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """The labels of its enums, the oldest first, and the attributes of its composites, by type."""
    captured: frozenset[str] = frozenset()
    """Digests of the names of the captured columns."""

    def differs_from(self, old: Shape) -> Reason | None:
        """Why rows copied in the old shape hold other values now, though no change of theirs is in the log; None if not."""
        pairs = list(zip(old.columns, self.columns, strict=False))
        if any(before != now and not now.dropped for before, now in pairs):
            return Reason.COLUMN_CHANGED
        added = self.columns[len(old.columns) :]
        # The target still has the values of a dropped column of that name. Of one that came and went between two looks
        # the name is not known, so every new column may be that one.
        gone = {before.name for before, now in pairs if now.dropped and before.name != _DROPPED}
        unseen = ColumnMark(_DROPPED, _DROPPED) in added
        if any(mark.name in gone or unseen for mark in added if not mark.dropped):
            return Reason.COLUMN_CAME_BACK
        if any(number in self.defaults for number in range(len(old.columns) + 1, len(self.columns) + 1)):
            return Reason.COLUMN_FILLED
        # Another file alone comes from VACUUM FULL or TRUNCATE, other definitions alone from a new default.
        if self.file != old.file and self.defined != old.defined:
            return Reason.REWRITTEN
        if self._respelled(old.types or ()):
            return Reason.LABEL_RENAMED
        if old.left_out is not None:
            if self.captured & ({*old.left_out} - {*(self.left_out or ())}):
                return Reason.COLUMN_INCLUDED
            if self.insert_only != old.insert_only:
                return Reason.INSERT_ONLY_CHANGED
        return Reason.KEY_CHANGED if self.key != old.key else None

    def rekeyed_since(self, old: Shape) -> bool:
        """
        True if rows may have other keys than in the old shape, so that a copy would not overwrite the rows of the target.

        Say `ALTER TABLE t ALTER id TYPE bigint USING id + 10`: nobody can see the expression, only that the column was
        defined again and that the table was rewritten.
        """
        rewritten = self.file != old.file
        if old.keyed is None or self.keyed is None:
            return rewritten and self.defined != old.defined
        (kinds, defined), (old_kinds, old_defined) = self.keyed.split("."), old.keyed.split(".")
        return kinds != old_kinds or (rewritten and defined != old_defined)

    def _respelled(self, types: Iterable[TypeMark]) -> bool:
        """True if a value of one of these types has another text now: a label was renamed (not added), or an attribute came."""
        return any(
            digest(*self.members[each.oid][: each.count]) != each.members for each in types if each.oid in self.members
        )

    def after(self, old: Shape) -> Shape:
        """This shape, for the position: columns that were dropped since the old one keep their names in it."""
        nothing = ColumnMark(_DROPPED, _DROPPED)
        columns = tuple(
            ColumnMark(before.name if now.name == _DROPPED else now.name, now.kind)
            for before, now in zip_longest(old.columns, self.columns, fillvalue=nothing)
        )
        return Shape(columns, self.file, self.defined, self.key, self.types, self.left_out, self.keyed)

    def stored(self) -> Shape:
        """The parts that are kept in the position."""
        return Shape(self.columns, self.file, self.defined, self.key, self.types, self.left_out, self.keyed)


def _type_mark(text: str) -> TypeMark:
    oid, count, members = text.split(".")
    return TypeMark(int(oid), int(count), members)


def _stored(value: Any) -> Any:
    if isinstance(value, str):
        return Shape.parse(value) if value else None
    return value


StoredShape = Annotated[
    Shape | None, BeforeValidator(_stored), PlainSerializer(lambda shape: str(shape) if shape else "", return_type=str)
]
"""A shape in the position; an empty text if the position is from before there were shapes."""
