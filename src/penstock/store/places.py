"""What a store can do, whichever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Generic, Protocol, TypeVar


class Changed(Exception):
    """The object is no longer the one that was expected."""


@dataclass(frozen=True)
class Entry:
    """A file as it is now."""

    place: Any
    size: int
    etag: str
    """Changes with every write: tells a file from a later one with the same name."""
    modified_ns: int


class Upload(Protocol):
    """A file that is being written."""

    @property
    def file(self) -> Any:
        """What Arrow writes to."""

    def finish(self) -> int:
        """Complete the file; gives its size."""

    def abandon(self) -> None:
        """Give it up: an object never appears, whatever is still written. Close `file` afterwards."""


P = TypeVar("P")


class Store(ABC, Generic[P]):
    """One kind of place. The functions of `penstock.store` say what each method promises."""

    @abstractmethod
    def put(self, place: P, data: bytes) -> None: ...

    @abstractmethod
    def create(self, place: P, data: bytes) -> bool: ...

    @abstractmethod
    def head(self, place: P) -> Entry | None: ...

    @abstractmethod
    def heads(self, places: Sequence[P]) -> list[Entry | None]: ...

    @abstractmethod
    def listed(self, below: P, start_after: str) -> Iterator[Entry]: ...

    @abstractmethod
    def names(self, directory: P) -> list[str]: ...

    @abstractmethod
    def delete(self, places: Sequence[P]) -> None: ...

    @abstractmethod
    def copy(self, source: P, target: P) -> None: ...

    @abstractmethod
    def writer(self, place: P) -> Upload: ...

    @abstractmethod
    def reader(self, place: P, expected: Entry | None) -> IO[bytes]: ...

    def make_directory(self, place: P) -> None:
        """Nothing, where there are no directories."""

    def sync(self, places: Sequence[P]) -> None:
        """Nothing, where an answer means durable."""

    def refuse_without_conditions(self, below: P) -> None:
        """Nothing, where creation is exclusive by nature."""
