"""
Wire formats: payload bytes to typed Arrow rows, and back, a batch at a time.

A format knows nothing of topics, registries or what becomes of a failure. It is a picklable value: made on the driver,
used in tasks.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from penstock.config import Config
from penstock.errors import ConfigError

O = TypeVar("O", bound=Config)  # noqa: E741

GROUP = "penstock.formats"
"""Entry-point group of third-party formats."""

Positions: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

Failed: TypeAlias = dict[int, tuple[str, str]]
"""The rule and the reason of each failure, by the payload's position."""


@dataclass(frozen=True)
class WireSchema:
    """A schema as a file or a registry holds it."""

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
    origin: str = ""
    """Address of a registry that is part of a broker, for those who send to the same broker and name the id beside a payload."""


Resolver = Callable[[int], WireSchema]
"""The writer's schema by the id in a message's frame. Raises `DataError` for an id that the registry does not have."""


@dataclass(frozen=True)
class Failures:
    """Payloads that could not be decoded. The three have one entry each per payload."""

    positions: Positions = field(default_factory=lambda: np.empty(0, np.int64))
    """Their places in the batch, ascending."""
    rules: tuple[str, ...] = ()
    """What was broken, a stable name: `json.syntax`, `json_schema.required`, `avro.truncated`."""
    reasons: tuple[str, ...] = ()
    """One sentence for people; names fields and types, never values."""

    @classmethod
    def of(cls, found: Failed) -> Failures:
        """From the rule and the reason of each position, in any order."""
        positions = sorted(found)
        rules, reasons = (tuple(found[at][i] for at in positions) for i in (0, 1))
        return cls(np.array(positions, np.int64), rules, reasons)

    def __len__(self) -> int:
        return len(self.rules)


@dataclass(frozen=True)
class Decoded:
    """What became of a batch of payloads: every one is a row or a failure."""

    rows: pa.RecordBatch
    positions: Positions
    """The place of each row's payload in the batch, ascending."""
    failures: Failures = field(default_factory=Failures)

    @classmethod
    def of(
        cls,
        rows: pa.RecordBatch,
        positions: Positions,
        tombstones: Positions,
        failures: Failed,
    ) -> Decoded:
        """From the rows of payloads at `positions`, ascending, and what became of the others."""
        if len(tombstones):
            every = np.concatenate([positions, tombstones])
            order = np.argsort(every, kind="stable")
            rows = rows.take(pa.array(order, pa.int64(), mask=order >= len(positions)))
            positions = every[order]
        return cls(rows, positions, Failures.of(failures))


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
    uses_keys: ClassVar[bool] = False
    """True: a tombstone is the delete of its key, and a failure if the key is not given."""

    def __init__(self, options: O, schema: WireSchema | None = None, resolve: Resolver | None = None) -> None:
        if self.schema_use == "required" and schema is None:
            raise ConfigError(
                f"the format {self.name} needs a schema",
                code="PEN-1004",
                hint="set schema_file, or a subject of the registry",
            )
        if self.schema_use == "refused" and schema is not None:
            raise ConfigError(
                f"the format {self.name} takes no schema", code="PEN-1016", hint="leave out schema_file and subject"
            )
        self.options = options
        self.schema = schema
        """The reader's schema when decoding, the writer's when encoding."""
        self.resolve = resolve

    @classmethod
    def record_name(cls, options: O, schema: WireSchema) -> str:
        """What the schema itself calls its payloads, in full, for `{record}` in a subject; empty: it has no name for them."""
        return ""

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

    def decode_with_keys(self, payloads: pa.Array, keys: pa.Array, known: pa.Schema | None = None) -> Decoded:
        """As `decode`, with the messages' keys, for formats whose rows need them (`uses_keys`)."""
        return self.decode(payloads, known)

    def encode(self, rows: pa.RecordBatch) -> pa.Array:
        """
        A binary array of payloads, one per row, in a task.

        Raises `SchemaError` for columns that the format has no place for, `DataError` for values that it has none for.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Entry:
    """A format that can be named, imported or not."""

    name: str
    target: str
    """`module:Class`."""
    extra: str = ""
    modules: tuple[str, ...] = ()
    """What the extra installs."""


BUILT_IN: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("json", "penstock.formats.json:Json"),
        Entry("json_schema", "penstock.formats.json_schema:JsonSchema", "json-schema", ("jsonschema_rs", "orjson")),
        Entry("avro", "penstock.formats.avro:Avro"),
        Entry("protobuf", "penstock.formats.protobuf:Protobuf", "protobuf", ("ptars", "grpc_tools")),
        Entry("debezium", "penstock.formats.debezium:Debezium"),
        Entry("csv", "penstock.formats.csv:Csv"),
        Entry("string", "penstock.formats.plain:String"),
        Entry("number", "penstock.formats.plain:Number"),
        Entry("bytes", "penstock.formats.plain:Bytes"),
    )
}


def entries() -> list[Entry]:
    """Everything that can be named, nothing imported; a built-in name takes precedence over an entry point's."""
    points = [Entry(point.name, point.value) for point in entry_points(group=GROUP) if point.name not in BUILT_IN]
    return [*BUILT_IN.values(), *points]


def _installed(name: str) -> Entry:
    found = {entry.name: entry for entry in entries()}
    if name not in found:
        near = next(iter(difflib.get_close_matches(name, found, n=1)), None)
        raise ConfigError(
            f"unknown format {name!r}" + (f"; did you mean {near!r}?" if near else ""),
            code="PEN-1006",
            hint=f"there are {', '.join(sorted(found))}",
        )
    return found[name]


def load(name: str) -> type[Format[Any]]:
    """The class of a format; asked for in every epoch, so that a built-in one must not take a look at all that is installed."""
    entry = BUILT_IN.get(name) or _installed(name)
    missing = next((module for module in entry.modules if find_spec(module) is None), None)
    if missing:
        raise ConfigError(
            f"the format {name!r} needs the module {missing}, which is not installed",
            code="PEN-1007",
            hint=f"pip install 'penstock[{entry.extra}]'",
        )
    module, _, attribute = entry.target.partition(":")
    try:
        format = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a stranger's module may fail in any way, and the file's reader must know how
        raise ConfigError(
            f"cannot import the format {name!r} from {entry.target!r}: {type(error).__name__}: {error}",
            code="PEN-1006",
            hint="import it by itself to see where it fails",
        ) from error
    if not (inspect.isclass(format) and issubclass(format, Format)):
        raise ConfigError(
            f"{entry.target!r} is no format", code="PEN-1006", hint="a format derives from penstock.formats.Format"
        )
    return format
