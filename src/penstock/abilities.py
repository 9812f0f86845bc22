"""What a connector may be able to do besides what its base class asks for; the front finds out by `isinstance`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

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
