"""Avro's binary encoding, bare or framed."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa

from penstock.config import Config
from penstock.errors import ConfigError, DataError
from penstock.formats import Decoded, Format, Resolver, WireSchema, framing
from penstock.formats.avro import decode as decoding
from penstock.formats.avro import encode as encoding
from penstock.formats.avro.schema import parse


class AvroConfig(Config):
    framing: Literal["none", "confluent", "single_object"] = "none"
    """What comes before each payload: nothing, Confluent's prefix, or the header of Avro's single-object encoding."""


class Avro(Format[AvroConfig]):
    """
    One column per field of the record, or a column `value` if the schema is another type.

    A payload is read with the schema that its frame names and given as the reader's schema describes it.
    """

    name = "avro"
    options_type = AvroConfig
    schema_use = "required"

    def __init__(self, options: AvroConfig, schema: WireSchema | None = None, resolve: Resolver | None = None) -> None:
        super().__init__(options, schema, resolve)
        assert schema is not None
        self._schema = schema
        self._type = parse(schema)

    @classmethod
    def record_name(cls, options: AvroConfig, schema: WireSchema) -> str:
        return parse(schema).name

    def columns(self) -> pa.Schema:
        kind = self._type
        if kind.kind == "record":
            return pa.schema([pa.field(each.name, each.type.arrow) for each in kind.fields])
        return pa.schema([pa.field("value", kind.arrow)])

    def decode(self, payloads: pa.Array, known: pa.Schema | None = None) -> Decoded:
        return decoding.decode(payloads, self._schema, self.columns(), self.options.framing, self._writer)

    def encode(self, rows: pa.RecordBatch) -> pa.Array:
        bodies = encoding.encode(rows, self._type)
        if self.options.framing == "single_object":
            return framing.add_single_object(bodies, framing.fingerprint(self._schema.text))
        if self.options.framing == "confluent":
            if not self._schema.id:
                raise ConfigError(
                    "Confluent's framing needs a schema that is in a registry: this one has no id",
                    hint='register the schema, or set framing = "none"',
                )
            return framing.add(bodies, self._schema.id)
        return bodies

    def _writer(self, id: int) -> WireSchema:
        own = self._schema
        is_own = id == (framing.fingerprint(own.text) if self.options.framing == "single_object" else own.id)
        if is_own or (self.resolve is None and self.options.framing == "confluent"):
            return own
        if self.resolve is None:
            raise DataError(f"no schema has the fingerprint {id:016x}", code="PEN-3001")
        return self.resolve(id)
