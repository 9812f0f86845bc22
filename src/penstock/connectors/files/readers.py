"""From one file to Arrow batches, in flat memory; bad rows are left out, counted and named at the end."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from penstock.connectors.files import splits
from penstock.connectors.files.csv_text import Counted, closed, line_of
from penstock.connectors.files.json_lines import infer_jsonl, read_jsonl
from penstock.connectors.files.splits import BadRows, FileSplit, cast, is_planned, opened, salvage, stream_of
from penstock.connectors.files.types import (
    csv_misfits,
    fixed,
    flat,
    inferred_from_csv,
    merge,
)
from penstock.errors import DataError, RetryableError, reason_of
from penstock.formats.exact import ROUNDED
from penstock.formats.json_parse import has_large

_HEAD_BYTES = 256 << 10
_BATCH_ROWS = 65536


def read(split: FileSplit, bad: BadRows) -> Iterator[pa.RecordBatch]:
    """The rows of a split, with the columns of its schema first; `RangeGone` if the file is not the one that was planned."""
    with opened(split) as file:
        # A reader may close its file, and the name may point to another one by now. An object is read by its version.
        descriptor = os.dup(file.fileno()) if split.object is None else None
        try:
            yield from _READERS[split.format](split, file, bad)
            same = descriptor is None or is_planned(split, os.fstat(descriptor))
        except pa.ArrowNotImplementedError as error:
            raise DataError(
                f"{split.path} cannot be read with the columns {_shown(split.schema)}: {reason_of(error)}",
                code="PEN-3001",
                hint="give other types in `columns`",
            ) from error
        finally:
            if descriptor is not None:
                os.close(descriptor)
    if not same:
        raise RetryableError(
            f"{split.path} changed while it was read", hint="files must not change once they are there"
        )


def head(split: FileSplit) -> bytes:
    """What a schema can be inferred from: the first lines of a text file, the schema of a Parquet file."""
    with opened(split) as file:
        if split.format == "parquet":
            return bytes(pa.parquet.read_schema(file).serialize())
        data: bytes = stream_of(split, file).read(_HEAD_BYTES)
        return data if len(data) < _HEAD_BYTES else data[: data.rfind(b"\n") + 1] or data


def infer(split: FileSplit, data: bytes) -> pa.Schema | None:
    """The schema of a file with this head; None when it tells nothing."""
    try:
        if split.format == "parquet":
            return flat(pa.ipc.read_schema(pa.py_buffer(data)))
        if not data.strip():
            return None
        if split.format == "csv":
            return _infer_csv(split, data)
        return infer_jsonl(data)
    except pa.ArrowInvalid:
        return None  # the task that reads the file says what is wrong with it


def row_groups(split: FileSplit) -> list[int]:
    """Bytes of each row group of a Parquet file; empty when it cannot be read, which the task then reports."""
    try:
        with opened(split) as file:
            about = pa.parquet.read_metadata(file)
            return [about.row_group(group).total_byte_size for group in range(about.num_row_groups)]
    except (DataError, pa.ArrowInvalid):
        return []


# -- CSV -------------------------------------------------------------------------------------------------------------


def _read_csv(split: FileSplit, file: pa.NativeFile, bad: BadRows) -> Iterator[pa.RecordBatch]:
    start = head(split)
    if not start.strip():
        return
    try:
        own = _infer_csv(split, start)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{split.path} cannot be read as CSV: {reason_of(error)}", code="PEN-3001", hint="check `delimiter`"
        ) from error
    schema = _schema_of_rows(split, own)
    done, counted = 0, Counted(stream_of(split, file))
    try:
        for batch in _csv_batches(split, counted, schema, bad):
            if has_large(batch) or counted.is_open_ended:
                raise pa.ArrowInvalid(ROUNDED)  # maybe: the texts say
            yield batch
            done += batch.num_rows
    except pa.ArrowInvalid:
        bad.clear()  # the second reading meets the same rows again
        present = pa.schema([field for field in schema if field.name in own.names])
        with opened(split) as again:
            stream = closed(split, bad) or stream_of(split, again)
            for piece in _salvage_csv(split, stream, present, bad, done):
                yield _conformed(piece, schema)


def _salvage_csv(
    split: FileSplit, stream: pa.NativeFile, schema: pa.Schema, bad: BadRows, done: int
) -> Iterator[pa.RecordBatch]:
    """The rows from `done` on, read as bytes and converted piece by piece by the same converter."""
    written = FileSplit(split.path, 0, 0, "csv", delimiter=",")
    at = 0
    try:
        for raw in _csv_batches(split, stream, pa.schema([(name, pa.binary()) for name in schema.names]), bad):
            misfits = csv_misfits(raw, schema)
            numbers = [number for number in range(max(0, done - at), raw.num_rows) if number not in misfits]
            rows = raw.take(pa.array(numbers, pa.int64()))

            def convert(lo: int, hi: int, rows: pa.RecordBatch = rows) -> pa.RecordBatch:
                text = io.BytesIO()
                pa.csv.write_csv(rows.slice(lo, hi - lo), text)
                table = pa.Table.from_batches(_csv_batches(written, pa.BufferReader(text.getvalue()), schema, bad))
                return table.combine_chunks().to_batches()[0]

            refused: dict[int, pa.ArrowInvalid] = {}
            yield from salvage(rows.num_rows, convert, refused.__setitem__)
            misfits.update((numbers[row], str(why)) for row, why in refused.items())
            for number, why in sorted(misfits.items()):
                bad.add(f"row {at + number + 1:,}", why, line_of(raw, number, split.separator))
            at += raw.num_rows
    except pa.ArrowInvalid as error:
        bad.add(f"after row {at:,}", error)


def _csv_batches(
    split: FileSplit, stream: pa.NativeFile | Counted, schema: pa.Schema, bad: BadRows
) -> Iterator[pa.RecordBatch]:
    def skip(row: pa.csv.InvalidRow) -> str:
        bad.add(f"line {row.number:,}", f"{row.actual_columns} columns instead of {row.expected_columns}", row.text)
        return "skip"

    reader = pa.csv.open_csv(
        stream,
        read_options=pa.csv.ReadOptions(
            use_threads=False, block_size=splits.BLOCK_BYTES, column_names=None if split.header else schema.names
        ),
        parse_options=pa.csv.ParseOptions(delimiter=split.separator, newlines_in_values=True, invalid_row_handler=skip),
        convert_options=pa.csv.ConvertOptions(
            column_types=dict(zip(schema.names, schema.types, strict=True)),
            include_columns=schema.names,
            include_missing_columns=True,
        ),
    )
    yield from (batch for batch in reader if batch.num_rows)


def _infer_csv(split: FileSplit, data: bytes) -> pa.Schema:
    reader = pa.csv.open_csv(
        pa.BufferReader(data),
        read_options=pa.csv.ReadOptions(
            use_threads=False, autogenerate_column_names=not split.header, block_size=len(data) + 1
        ),
        parse_options=pa.csv.ParseOptions(
            delimiter=split.separator, newlines_in_values=True, invalid_row_handler=lambda row: "skip"
        ),
    )
    if not split.header and split.schema is not None:
        return split.schema
    return pa.schema([(field.name, inferred_from_csv(field.type)) for field in reader.schema])


# -- Parquet ---------------------------------------------------------------------------------------------------------


def _read_parquet(split: FileSplit, file: pa.NativeFile, bad: BadRows) -> Iterator[pa.RecordBatch]:
    try:
        parquet = pa.parquet.ParquetFile(file)
        own = flat(parquet.schema_arrow)
        schema = _schema_of_rows(split, own)
        names = [name for name in own.names if name in schema.names]
        groups = list(range(split.start, parquet.num_row_groups if split.end is None else split.end))
        at = 0
        for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=groups, columns=names, use_threads=False):

            def convert(lo: int, hi: int, batch: pa.RecordBatch = batch) -> pa.RecordBatch:
                return _conformed(batch.slice(lo, hi - lo), schema)

            def report(row: int, why: pa.ArrowInvalid, batch: pa.RecordBatch = batch, before: int = at) -> None:
                where = f"row {before + row + 1:,}" + (f" of row groups from {split.start}" if split.start else "")
                bad.add(where, why, json.dumps(batch.slice(row, 1).to_pylist()[0], default=str, ensure_ascii=False))

            yield from salvage(batch.num_rows, convert, report)
            at += batch.num_rows
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{split.path} cannot be read as Parquet: {reason_of(error)}",
            code="PEN-3001",
            hint="replace it under a new name",
        ) from error


def _conformed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = []
    for field in schema:
        at = batch.schema.get_field_index(field.name)
        if at < 0:
            columns.append(pa.nulls(batch.num_rows, field.type))
        else:
            columns.append(cast(batch.column(at), field))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _schema_of_rows(split: FileSplit, own: pa.Schema) -> pa.Schema:
    """What the rows of a file with columns of its own look like."""
    if len(set(own.names)) < len(own.names):
        raise DataError(f"{split.path} has two columns of one name: {', '.join(own.names)}", code="PEN-3001")
    schema = split.schema if split.explicit and split.schema else merge(split.schema, own, widen=fixed)
    if not set(own.names) & set(schema.names):
        raise DataError(
            f"{split.path} has none of the columns {', '.join(schema.names)} but {', '.join(own.names)}",
            code="PEN-3001",
            hint="check `columns`, for CSV also `delimiter` and `header`",
        )
    return schema


# -- all of them -----------------------------------------------------------------------------------------------------

_READERS = {"jsonl": read_jsonl, "csv": _read_csv, "parquet": _read_parquet}


def _shown(schema: pa.Schema | None) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema or ())
