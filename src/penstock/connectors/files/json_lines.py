"""JSON lines: blocks of whole lines to Arrow, and line by line where a block has bad ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from penstock.connectors.files import splits
from penstock.connectors.files.splits import BadRows, FileSplit, cast, opened, salvage, stream_of
from penstock.connectors.files.types import (
    empty_lists,
    fits,
    fixed,
    inferred_from_json,
    merge,
    text_time,
    widest,
)
from penstock.formats.exact import ROUNDED
from penstock.formats.json_parse import has_large, has_whole_lists, inexact
from penstock.formats.json_text import text_of


def read_jsonl(split: FileSplit, file: pa.NativeFile, bad: BadRows) -> Iterator[pa.RecordBatch]:
    schema = split.schema
    for offset, block in _line_blocks(split, stream_of(split, file)):
        if not block.strip():
            continue
        batches: Iterable[pa.RecordBatch | None]
        try:
            batches = [_json_batch(block, schema, split.explicit)]
        except pa.ArrowInvalid:
            batches = _salvage_lines(split, offset, block, schema, bad)
        for batch in batches:
            if batch is not None:
                if not split.explicit:
                    schema = batch.schema  # a type that one block has chosen binds the next ones
                yield batch


def _salvage_lines(
    split: FileSplit, offset: int, block: bytes, schema: pa.Schema | None, bad: BadRows
) -> Iterator[pa.RecordBatch | None]:
    lines, misfits = _sorted_out(block, schema)
    known = schema

    def convert(lo: int, hi: int) -> pa.RecordBatch | None:
        nonlocal known
        batch = _json_batch(b"\n".join(line for _, line in lines[lo:hi]), known, split.explicit)
        if batch is not None and not split.explicit:
            known = batch.schema
        return batch

    yield from salvage(len(lines), convert, lambda at, why: misfits.append((*lines[at], str(why))))
    before: int | None = None
    for number, line, why in sorted(misfits):
        before = before if before is not None or not bad.names else _lines_before(split, offset)
        bad.add(f"line {before + number + 1:,}" if before is not None else "", why, line)


def _sorted_out(block: bytes, schema: pa.Schema | None) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes, str]]]:
    """The numbered lines that may be good, and those that are certainly bad, with the reason."""
    good, misfits = [], []
    for number, line in enumerate(block.split(b"\n")):
        if line.strip():
            why = misfit(line, schema)
            if why:
                misfits.append((number, line, why))
            else:
                good.append((number, line))
    return good, misfits


def misfit(line: bytes, schema: pa.Schema | None) -> str:
    """Why a line certainly cannot be used; most bad lines are found so, long before halving would find them one by one."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return f"not JSON from character {error.pos} on: {error.msg.removesuffix(' starting at').removesuffix(' at')}"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(row, dict):
        return "not a JSON object"
    for field in schema or ():
        value = row.get(field.name)
        if value is not None and not fits(value, field.type):
            if type(value) is int and pa.types.is_floating(field.type):
                return f"column {field.name!r} holds {ROUNDED}"
            return f"column {field.name!r} is a {type(value).__name__}, not {field.type}"
    return ""


def infer_jsonl(data: bytes) -> pa.Schema | None:
    """The schema of the good lines; a bad one among the first must not hide it."""
    try:
        return inferred_from_json(parse(data, None, "infer").schema)
    except pa.ArrowInvalid:
        lines, _ = _sorted_out(data, None)

    def convert(lo: int, hi: int) -> pa.RecordBatch:
        return parse(b"\n".join(line for _, line in lines[lo:hi]), None, "infer")

    schema = None
    for batch in salvage(len(lines), convert, lambda at, why: None):
        schema = schema if batch is None else merge(schema, inferred_from_json(batch.schema), widen=widest)
    return schema


def _line_blocks(split: FileSplit, stream: pa.NativeFile) -> Iterator[tuple[int, bytes]]:
    """Whole lines, those that start in the split, in blocks; each with its offset in the (uncompressed) file."""
    at, data = 0, b""
    if split.start:
        at = split.start - 1  # a line starts at `start` only if the byte before it ends one
        stream.seek(at)
        while b"\n" not in data:
            chunk = stream.read(splits.BLOCK_BYTES)
            if not chunk:
                return
            at, data = at + len(data), chunk
        cut = data.index(b"\n") + 1
        at, data = at + cut, data[cut:]
    while split.end is None or at < split.end:
        stop = -1 if split.end is None or at + len(data) < split.end else data.find(b"\n", split.end - 1 - at)
        if stop >= 0:
            yield at, data[: stop + 1]
            return
        cut = data.rfind(b"\n", 0, None if split.end is None else max(0, split.end - 1 - at)) + 1
        if cut:
            yield at, data[:cut]
            at, data = at + cut, data[cut:]
        chunk = stream.read(splits.BLOCK_BYTES)
        if not chunk:
            break
        data += chunk
    if data and (split.end is None or at < split.end):
        yield at, data


def _lines_before(split: FileSplit, offset: int) -> int:
    with opened(split) as file:
        stream, lines = stream_of(split, file), 0
        while offset > 0 and (chunk := stream.read(min(offset, splits.BLOCK_BYTES))):
            lines += chunk.count(b"\n")
            offset -= len(chunk)
        return lines


def _json_batch(data: bytes, schema: pa.Schema | None, explicit: bool) -> pa.RecordBatch | None:
    """The rows in `data`; unless the schema is explicit, with the columns that it does not know after its own."""
    if explicit:
        return _parse(data, schema, "ignore")
    batch = _parse(data, schema, "infer")
    if schema is not None and batch.schema.equals(schema):
        return batch.replace_schema_metadata(schema.metadata)
    wanted = merge(schema, inferred_from_json(batch.schema), widen=fixed)
    if not len(wanted):
        return None
    as_wanted = all(batch.schema.field(name).type == wanted.field(name).type for name in wanted.names)
    if as_wanted and all(map(has_whole_lists, batch.columns)):
        return batch.select(wanted.names).replace_schema_metadata(wanted.metadata)
    return _parse(data, wanted, "ignore").replace_schema_metadata(wanted.metadata)


def _parse(data: bytes, schema: pa.Schema | None, unexpected: str) -> pa.RecordBatch:
    """The rows; of lists that were empty when they were taken for lists of text, other items are text as well."""
    try:
        return parse(data, schema, unexpected)
    except pa.ArrowInvalid:
        if schema is None or not (empty := empty_lists(schema).intersection(schema.names)):
            raise
        found = parse(data, pa.schema([field for field in schema if field.name not in empty]), "infer").schema
        kinds = {name: text_time(found.field(name).type) for name in empty.intersection(found.names)}
        others = {name: kind for name, kind in kinds.items() if kind is not None and kind != pa.list_(pa.string())}
        if not others or not all(map(pa.types.is_list, others.values())):
            raise
    batch = parse(data, pa.schema([(each.name, others.get(each.name, each.type)) for each in schema]), unexpected)
    for name in others:
        batch = batch.set_column(batch.schema.get_field_index(name), name, _as_texts(batch.column(name)))
    return batch


def _as_texts(lists: pa.ListArray) -> pa.ListArray:
    """Each item as its JSON text."""
    items = lists.values
    texts = pc.if_else(items.is_valid(), text_of(items, "item"), pa.scalar(None, pa.string()))
    return pa.ListArray.from_arrays(lists.offsets, texts, mask=lists.is_null() if lists.null_count else None)


def _exact(data: bytes, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows, if no column of doubles has rounded a whole number of theirs."""
    if has_large(batch):
        lines = pa.array([line for line in data.split(b"\n") if line.strip()], pa.binary())
        if len(lines) == batch.num_rows and inexact(lines, batch):
            raise pa.ArrowInvalid(ROUNDED)
    return batch


def parse(data: bytes, schema: pa.Schema | None, unexpected: str) -> pa.RecordBatch:
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise pa.ArrowInvalid(f"not UTF-8: {error.reason}") from error
    asked = pa.schema([(field.name, _json_type(field.type)) for field in schema or ()])
    table = pa.json.read_json(
        pa.BufferReader(data),
        read_options=pa.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=pa.json.ParseOptions(explicit_schema=asked or None, unexpected_field_behavior=unexpected),
    )
    batches = table.combine_chunks().to_batches()
    batch = batches[0] if batches else pa.RecordBatch.from_pylist([])
    for at, field in enumerate(schema or ()):
        if asked.field(at).type != field.type:
            batch = batch.set_column(at, field, cast(batch.column(at), field))
    return _exact(data, batch)


def _json_type(kind: pa.DataType) -> pa.DataType:
    """Arrow takes dates and times from JSON numbers only; people write them as text."""
    return pa.string() if pa.types.is_date(kind) or pa.types.is_time(kind) else kind
