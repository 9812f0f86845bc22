"""What a connector may be able to do besides what its base class asks for; the front finds out by `isinstance`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from penstock.source import SourceBatch


@runtime_checkable
class Sampled(Protocol):
    """For `penstock check --sample`: a source whose first range leaves a trace, such as a slot, shows rows another way."""

    def sample(self, rows: int) -> Iterator[SourceBatch]:
        """About so many rows of each stream, as a first run would read them; after `open`. Changes nothing outside."""


@runtime_checkable
class Timed(Protocol):
    """For `penstock offsets reset --to TIME`: a range source that knows where it was at a time."""

    def position_at(self, when: datetime) -> Any:
        """The position from which everything since `when` is read; after `open`."""


@runtime_checkable
class Named(Protocol):
    """For OpenLineage: the config of a connector whose data has a name that others use, too."""

    def dataset(self, name: str) -> tuple[str, str]:
        """Namespace and name of a stream or topic, as OpenLineage names data of this system; without secrets."""


@runtime_checkable
class Peekable(Protocol):
    """For `penstock peek`: a sink whose target can be looked at."""

    def first_rows(self, topic: str, rows: int) -> pa.Table | None:
        """
        At most so many committed rows of a topic, the oldest first where the target knows; None if there is no target.

        After `open`. Reads little more than it shows, and changes no row.
        """


def first_of(pieces: Iterable[pa.Table], rows: int) -> pa.Table | None:
    """The first so many rows of some tables, which are read one after the other; None if there is no table."""
    parts: list[pa.Table] = []
    for piece in pieces:
        parts.append(piece.slice(0, rows - sum(each.num_rows for each in parts)))
        if sum(each.num_rows for each in parts) >= rows:
            break
    return pa.concat_tables(parts, promote_options="permissive") if parts else None
