"""
Wire formats: payload bytes to typed Arrow rows, and back, a batch at a time.

A format knows nothing of topics, registries or what becomes of a failure. It is a picklable value: made on the driver,
used in tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import pyarrow as pa

from penstock.config import Config

O = TypeVar("O", bound=Config)  # noqa: E741

GROUP = "penstock.formats"
"""Entry-point group of third-party formats."""


@dataclass(frozen=True)
class WireSchema:
    """A schema as it stands in a file or a registry."""

    type: str
    """`avro`, `json_schema` or `protobuf`."""
    text: str
    """Avro and JSON Schema: JSON. Protobuf: a `.proto` file, or a descriptor set in base64."""
    subject: str = ""
    version: int = 0
    id: int = 0
    """Of the registry; 0: it is in none."""
    references: tuple[tuple[str, WireSchema], ...] = ()
    """What the text imports: the name it is imported by, and the schema."""


Resolver = Callable[[int], WireSchema]
"""The writer's schema by the id in a message's frame. Raises `DataError` for an id that the registry does not have."""


@dataclass(frozen=True)
class Failures:
    """Payloads that could not be decoded. The three have one entry each per payload."""

    positions: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.empty(0, np.int64))
    """Where they stand in the batch, ascending."""
    rules: tuple[str, ...] = ()
    """What was broken, a stable name: `json.syntax`, `json_schema.required`, `avro.truncated`."""
    reasons: tuple[str, ...] = ()
    """One sentence for people; names fields and types, never values."""

    def __len__(self) -> int:
        return len(self.rules)


@dataclass(frozen=True)
class Decoded:
    """What became of a batch of payloads: every one is a row or a failure."""

    rows: pa.RecordBatch
    positions: np.ndarray[Any, np.dtype[np.int64]]
    """Where each row's payload stands in the batch, ascending."""
    failures: Failures = field(default_factory=Failures)


class Format(Generic[O]):
    """
    One wire format.

    Laws: `len(rows) + len(failures) = len(payloads)`, in order; the same payloads and `known` give the same answer; a
    null payload (a tombstone) is a row whose columns are all null; no payload crashes or hangs the decoder, and a bad
    one spoils no other.
    """

    name: ClassVar[str]
    options_type: ClassVar[type[Config]]
    schema_use: ClassVar[Literal["required", "optional", "refused"]] = "refused"

    def __init__(self, options: O, schema: WireSchema | None = None, resolve: Resolver | None = None) -> None:
        self.options = options
        self.schema = schema
        """The reader's schema when decoding, the writer's when encoding."""
        self.resolve = resolve

    def columns(self) -> pa.Schema | None:
        """The columns that `decode` gives, as the schema and the options fix them; None: inferred from the payloads."""
        raise NotImplementedError

    def decode(self, payloads: pa.Array, known: pa.Schema | None = None) -> Decoded:
        """
        Rows of a binary array, in a task.

        `known` are the columns of a format that infers, as of the epochs before: the rows have at least these, in this
        order, and new columns after them. Types only widen; a value that no wider type can take is a failure.
        """
        raise NotImplementedError

    def encode(self, rows: pa.RecordBatch) -> pa.Array:
        """A binary array of payloads, one per row, in a task; `SchemaError` for columns that the format has no place for."""
        raise NotImplementedError
