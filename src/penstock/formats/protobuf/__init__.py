"""Protobuf messages, bare or after Confluent's prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa

from penstock.config import Config
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.formats import Decoded, Format, Resolver, WireSchema, framing
from penstock.formats.pieces import Pieces, Reason, sliced
from penstock.formats.protobuf.codec import Codec, codec_for
from penstock.formats.protobuf.files import as_text, compiled, message_names
from penstock.formats.varint import Ints


class ProtobufConfig(Config):
    message: str = ""
    """Full name of the message, such as `shop.Order`; empty: the first of the schema."""

    framing: Literal["none", "confluent"] = "none"
    """What comes before each payload: nothing, or Confluent's prefix with the message indexes."""


class Protobuf(Format[ProtobufConfig]):
    """
    One column per field of the message, in the order of their numbers.

    Payloads are read with the reader's schema whatever the frame's id: fields are known by number, and those that the
    reader does not know are passed over. The id only says which message of the writer's file a payload is.
    """

    name = "protobuf"
    options_type = ProtobufConfig
    schema_use = "required"

    def __init__(
        self, options: ProtobufConfig, schema: WireSchema | None = None, resolve: Resolver | None = None
    ) -> None:
        if schema is not None:  # compiled here, on the driver: tasks get the descriptor set
            schema = replace(schema, text=as_text(compiled(schema)), references=())
        super().__init__(options, schema, resolve)
        assert schema is not None
        self._schema = schema
        self._codec()

    @classmethod
    def record_name(cls, options: ProtobufConfig, schema: WireSchema) -> str:
        return options.message or next(iter(message_names(compiled(schema)).values()), "")

    def _codec(self) -> Codec:
        return codec_for(compiled(self._schema), self.options.message)

    def columns(self) -> pa.Schema:
        return self._codec().schema

    def decode(self, payloads: pa.Array, known: pa.Schema | None = None) -> Decoded:
        own = self._codec()
        result = Pieces(own.schema)
        for first, piece in sliced(payloads):
            is_null = piece.is_null().to_numpy(zero_copy_only=False)
            nulls = np.flatnonzero(is_null)
            result.add(first + nulls, [pa.nulls(len(nulls), each.type) for each in own.schema])
            if self.options.framing == "none":
                rows, bodies = np.flatnonzero(~is_null), piece.drop_null().cast(pa.binary())
            else:
                found = framing.cells(piece)
                rows, starts = self._unframed(found, first, result)
                bodies = framing.gathered(found.data, starts, found.ends[rows])
            if len(rows):
                batch, bad = own.decode(bodies)
                is_good = np.ones(len(rows), bool)
                is_good[list(bad)] = False
                result.add(first + rows[is_good], batch.columns)
                for reason in dict.fromkeys(bad.values()):
                    places = [place for place, why in bad.items() if why == reason]
                    result.fail(first + rows[places], Reason(*reason))
        return result.decoded()

    def encode(self, rows: pa.RecordBatch) -> pa.Array:
        own = self._codec()
        bodies = own.encode(rows)
        if self.options.framing == "none":
            return bodies
        if not self._schema.id:
            raise ConfigError(
                "Confluent's framing needs a schema that is in a registry: this one has no id",
                hint='register the schema, or set framing = "none"',
            )
        paths = {name: path for path, name in message_names(compiled(self._schema)).items()}
        if own.message.full_name not in paths:
            raise SchemaError(
                f"the message {own.message.full_name} is not in the schema's own file, which Confluent's frame means",
                hint="use a schema that has the message itself",
            )
        return framing.add_indexes(bodies, self._schema.id, paths[own.message.full_name])

    def _unframed(self, found: framing.Cells, first: int, result: Pieces) -> tuple[Ints, Ints]:
        """The rows that hold this message, and where it begins in each."""
        rows = np.flatnonzero(found.is_valid)
        ids = framing.ids(found)
        which, paths, sizes = framing.indexes(found, framing.PREFIX)
        is_framed = (ids >= 0) & (which >= 0)
        missing = Reason(framing.NO_FRAME, "the payload does not begin with Confluent's prefix and message indexes")
        result.fail(first + rows[~is_framed[rows]], missing)
        is_ours = np.zeros(len(found), bool)
        for id, number in _pairs(ids, which, rows[is_framed[rows]]):
            some = rows[(ids[rows] == id) & (which[rows] == number)]
            reason = self._refusal(id, paths[number])
            if reason is None:
                is_ours[some] = True
            else:
                result.fail(first + some, reason)
        rows = np.flatnonzero(is_ours)
        return rows, found.starts[rows] + framing.PREFIX + sizes[rows]

    def _refusal(self, id: int, path: tuple[int, ...]) -> Reason | None:
        """Why payloads with this id and path are not ours."""
        try:
            is_own = self.resolve is None or id == self._schema.id
            writer = self._schema if is_own or self.resolve is None else self.resolve(id)
            names = message_names(compiled(writer))
        except DataError as error:
            return Reason(framing.rule_of(error), error.message)
        except SchemaError as error:
            return Reason("protobuf.incompatible", error.message)
        wanted = self._codec().message.full_name
        if names.get(path) == wanted:
            return None
        return Reason(
            "protobuf.message", f"the payload is a {names.get(path, 'message that its schema lacks')}, no {wanted}"
        )


def _pairs(ids: Ints, which: Ints, rows: Ints) -> Iterator[tuple[int, int]]:
    for id, number in np.unique(np.stack([ids[rows], which[rows]], axis=1), axis=0):
        yield int(id), int(number)
