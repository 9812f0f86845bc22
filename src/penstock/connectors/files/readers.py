"""From one file to Arrow batches, in flat memory; bad rows are left out, counted and named at the end."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from penstock.connectors.files.types import (
    csv_misfits,
    fits,
    fixed,
    flat,
    inferred_from_csv,
    inferred_from_json,
    merge,
    widest,
)
from penstock.errors import BadRecord, DataError, FatalError, RangeGone, RetryableError, reason_of
from penstock.formats.json_parse import has_whole_lists

Format = Literal["jsonl", "csv", "parquet"]

BLOCK_BYTES = 4 << 20
_HEAD_BYTES = 256 << 10
_BATCH_ROWS = 65536
_NAMED = 5
"""Bad rows of a split that are named; the others are counted."""
_ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class FileSplit:
    """A file, or the lines that start between two bytes, or the row groups between two numbers, with how to read them."""

    path: str
    size: int
    mtime_ns: int
    format: Format
    stream: str = ""
    schema: pa.Schema | None = None
    explicit: bool = False
    """The schema is the user's: fields that it does not name are ignored instead of added."""
    delimiter: str | None = None
    header: bool = True
    start: int = 0
    end: int | None = None

    @property
    def compression(self) -> str | None:
        return _COMPRESSIONS.get(os.path.splitext(self.path)[1])

    @property
    def separator(self) -> str:
        return self.delimiter or ("\t" if ".tsv" in os.path.basename(self.path) else ",")


def format_of(name: str) -> Format | None:
    """The format that a file's ending tells; None when it tells nothing."""
    stem, ending = os.path.splitext(name)
    return _ENDINGS.get(os.path.splitext(stem)[1] if ending in _COMPRESSIONS else ending)


KEPT_BYTES = 64 << 20
"""Of bad records of one split, in memory; beyond, they are counted and cannot become dead letters."""


class BadRows:
    """The rows of a split that could not be used: how many, and where the first few are and what is wrong with them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.count = 0
        self._named: list[str] = []
        self._records: list[BadRecord] = []
        self._bytes = 0

    @property
    def names(self) -> bool:
        """True while rows are still named, and not only counted."""
        return len(self._named) < _NAMED

    def add(self, where: str, why: object, text: str | bytes = b"") -> None:
        """Count a row, name it if it is one of the first few, and keep it for the dead letters."""
        data, reason = text.encode() if isinstance(text, str) else text, reason_of(why)
        place = f"{self.path}, {where}" if where else self.path
        if self.names:
            self._named.append(f"{place}: {reason}")
        self.count += 1
        self._bytes += len(data)
        if data and self._bytes <= KEPT_BYTES:
            self._records.append(BadRecord(data, place, reason))

    def clear(self) -> None:
        """The file is read again."""
        self.count = self._bytes = 0
        self._named.clear()
        self._records.clear()

    def error(self, stream: str) -> DataError:
        many = f" and {self.count - 1} more" if self.count > 1 else ""
        error = DataError(
            f"{self._named[0]}{many}",
            code="PEN-3001",
            hint="correct the file, where it is or under a new name; give the right types in `columns`; "
            'or leave such rows out with `on_error = "skip"`',
        )
        error.count, error.stream = self.count, stream
        error.samples = tuple(self._named)
        error.records = self._records if len(self._records) == self.count else ()
        return error


def read(split: FileSplit, bad: BadRows) -> Iterator[pa.RecordBatch]:
    """The rows of a split, with the columns of its schema first; `RangeGone` if the file is not the one that was planned."""
    with _opened(split) as file:
        descriptor = os.dup(file.fileno())  # a reader may close its file, and the name may point to another one by now
        try:
            yield from _READERS[split.format](split, file, bad)
            same = _is_planned(split, os.fstat(descriptor))
        except pa.ArrowNotImplementedError as error:
            raise DataError(
                f"{split.path} cannot be read with the columns {_shown(split.schema)}: {reason_of(error)}",
                code="PEN-3001",
                hint="give other types in `columns`",
            ) from error
        finally:
            os.close(descriptor)
    if not same:
        raise RetryableError(
            f"{split.path} changed while it was read", hint="files must not change once they are there"
        )


def head(split: FileSplit) -> bytes:
    """What a schema can be inferred from: the first lines of a text file, the schema of a Parquet file."""
    with _opened(split) as file:
        if split.format == "parquet":
            return bytes(pa.parquet.read_schema(file).serialize())
        data: bytes = _stream(split, file).read(_HEAD_BYTES)
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
        return _infer_jsonl(data)
    except pa.ArrowInvalid:
        return None  # the task that reads the file says what is wrong with it


def row_groups(split: FileSplit) -> list[int]:
    """Bytes of each row group of a Parquet file; empty when it cannot be read, which the task then reports."""
    try:
        with _opened(split) as file:
            about = pa.parquet.read_metadata(file)
            return [about.row_group(group).total_byte_size for group in range(about.num_row_groups)]
    except (DataError, pa.ArrowInvalid):
        return []


# -- JSON lines ------------------------------------------------------------------------------------------------------


def _read_jsonl(split: FileSplit, file: pa.NativeFile, bad: BadRows) -> Iterator[pa.RecordBatch]:
    schema = split.schema
    for offset, block in _line_blocks(split, _stream(split, file)):
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

    yield from _salvage(len(lines), convert, lambda at, why: misfits.append((*lines[at], str(why))))
    before: int | None = None
    for number, line, why in sorted(misfits):
        before = before if before is not None or not bad.names else _lines_before(split, offset)
        bad.add("" if before is None else f"line {before + number + 1:,}", why, line)


def _sorted_out(block: bytes, schema: pa.Schema | None) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes, str]]]:
    """The numbered lines that may be good, and those that are certainly bad, with the reason."""
    good, misfits = [], []
    for number, line in enumerate(block.split(b"\n")):
        if line.strip():
            why = _misfit(line, schema)
            if why:
                misfits.append((number, line, why))
            else:
                good.append((number, line))
    return good, misfits


def _misfit(line: bytes, schema: pa.Schema | None) -> str:
    """Why a line certainly cannot be used; most bad lines are found so, long before halving would find them one by one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(row, dict):
        return "not a JSON object"
    for field in schema or ():
        value = row.get(field.name)
        if value is not None and not fits(value, field.type):
            return f"column {field.name!r} is a {type(value).__name__}, not {field.type}"
    return ""


def _infer_jsonl(data: bytes) -> pa.Schema | None:
    """The schema of the good lines; a bad one among the first must not hide it."""
    try:
        return inferred_from_json(_parse_json(data, None, "infer").schema)
    except pa.ArrowInvalid:
        lines, _ = _sorted_out(data, None)

    def convert(lo: int, hi: int) -> pa.RecordBatch:
        return _parse_json(b"\n".join(line for _, line in lines[lo:hi]), None, "infer")

    schema = None
    for batch in _salvage(len(lines), convert, lambda at, why: None):
        schema = schema if batch is None else merge(schema, inferred_from_json(batch.schema), widen=widest)
    return schema


def _line_blocks(split: FileSplit, stream: pa.NativeFile) -> Iterator[tuple[int, bytes]]:
    """Whole lines, those that start in the split, in blocks; each with its offset in the (uncompressed) file."""
    at, data = 0, b""
    if split.start:
        at = split.start - 1  # a line starts at `start` only if the byte before it ends one
        stream.seek(at)
        while b"\n" not in data:
            chunk = stream.read(BLOCK_BYTES)
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
        chunk = stream.read(BLOCK_BYTES)
        if not chunk:
            break
        data += chunk
    if data and (split.end is None or at < split.end):
        yield at, data


def _lines_before(split: FileSplit, offset: int) -> int:
    with _opened(split) as file:
        stream, lines = _stream(split, file), 0
        while offset > 0 and (chunk := stream.read(min(offset, BLOCK_BYTES))):
            lines += chunk.count(b"\n")
            offset -= len(chunk)
        return lines


def _json_batch(data: bytes, schema: pa.Schema | None, explicit: bool) -> pa.RecordBatch | None:
    """The rows in `data`; unless the schema is explicit, with the columns that it does not know after its own."""
    if explicit:
        return _parse_json(data, schema, "ignore")
    batch = _parse_json(data, schema, "infer")
    if schema is not None and batch.schema.equals(schema):
        return batch
    wanted = merge(schema, inferred_from_json(batch.schema), widen=fixed)
    if not len(wanted):
        return None
    as_wanted = all(batch.schema.field(name).type == wanted.field(name).type for name in wanted.names)
    if as_wanted and all(map(has_whole_lists, batch.columns)):
        return batch.select(wanted.names)
    return _parse_json(data, wanted, "ignore")


def _parse_json(data: bytes, schema: pa.Schema | None, unexpected: str) -> pa.RecordBatch:
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
            batch = batch.set_column(at, field, _cast(batch.column(at), field))
    return batch


def _json_type(kind: pa.DataType) -> pa.DataType:
    """Arrow takes dates and times from JSON numbers only; people write them as text."""
    return pa.string() if pa.types.is_date(kind) or pa.types.is_time(kind) else kind


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
    done = 0
    try:
        for batch in _csv_batches(split, _stream(split, file), schema, bad):
            yield batch
            done += batch.num_rows
    except pa.ArrowInvalid:
        bad.clear()  # the second reading meets the same rows again
        present = pa.schema([field for field in schema if field.name in own.names])
        with _opened(split) as again:
            for piece in _salvage_csv(split, _stream(split, again), present, bad, done):
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
            yield from _salvage(rows.num_rows, convert, refused.__setitem__)
            misfits.update((numbers[row], str(why)) for row, why in refused.items())
            for number, why in sorted(misfits.items()):
                (row,) = raw.slice(number, 1).to_pylist()
                text = {name: value.decode(errors="replace") for name, value in row.items()}
                bad.add(f"row {at + number + 1:,}", why, str(text))
            at += raw.num_rows
    except pa.ArrowInvalid as error:
        bad.add(f"after row {at:,}", error)


def _csv_batches(split: FileSplit, stream: pa.NativeFile, schema: pa.Schema, bad: BadRows) -> Iterator[pa.RecordBatch]:
    def skip(row: pa.csv.InvalidRow) -> str:
        bad.add(f"line {row.number:,}", f"{row.actual_columns} columns instead of {row.expected_columns}", row.text)
        return "skip"

    reader = pa.csv.open_csv(
        stream,
        read_options=pa.csv.ReadOptions(
            use_threads=False, block_size=BLOCK_BYTES, column_names=None if split.header else schema.names
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
                bad.add(where, why, str(batch.slice(row, 1).to_pylist()[0]))

            yield from _salvage(batch.num_rows, convert, report)
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
            columns.append(_cast(batch.column(at), field))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _cast(column: pa.Array, field: pa.Field) -> pa.Array:
    try:
        return column if column.type == field.type else column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise type(error)(f"column {field.name!r} is {column.type}, not {field.type}") from error


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

_READERS = {"jsonl": _read_jsonl, "csv": _read_csv, "parquet": _read_parquet}


def _salvage(
    count: int, convert: Callable[[int, int], pa.RecordBatch | None], report: Callable[[int, pa.ArrowInvalid], None]
) -> Iterator[pa.RecordBatch | None]:
    """Convert rows in the largest pieces that can be converted; halving finds a bad row in few steps."""
    pieces = [(0, count)] if count else []
    while pieces:
        lo, hi = pieces.pop()
        try:
            batch = convert(lo, hi)
        except pa.ArrowInvalid as error:
            if hi - lo == 1:
                report(lo, error)
            else:
                middle = (lo + hi) // 2
                pieces += [(middle, hi), (lo, middle)]
        else:
            yield batch


def _stream(split: FileSplit, file: pa.NativeFile) -> pa.NativeFile:
    return pa.CompressedInputStream(file, split.compression) if split.compression else file


@contextlib.contextmanager
def _opened(split: FileSplit) -> Iterator[pa.NativeFile]:
    """The planned file; one that is gone or was rewritten is a `RangeGone`, so that no range ever holds other rows."""
    try:
        with pa.OSFile(split.path) as file:
            if not _is_planned(split, os.fstat(file.fileno())):
                raise RangeGone(f"{split.path} changed after it was planned", hint=_PREPARED)
            yield file
    except FileNotFoundError as error:
        raise RangeGone(f"{split.path} is gone, and it was planned", hint=_PREPARED) from error
    except PermissionError as error:
        raise FatalError(
            f"cannot read {split.path}", code="PEN-5001", hint="give this user permission to read it"
        ) from error
    except OSError as error:
        if error.errno is None:  # Arrow's own: a stream that cannot be decompressed, a corrupt page
            raise DataError(
                f"{split.path} is damaged: {error}", code="PEN-3001", hint="replace it under a new name"
            ) from error
        raise RetryableError(f"cannot read {split.path}: {error.strerror}") from error


_PREPARED = "put the file back as it was: a sink has staged its rows, and has to stage them again"
"""What is left to do once an epoch is prepared; before that, the runtime plans the files again by itself."""


def _is_planned(split: FileSplit, about: os.stat_result) -> bool:
    return (about.st_size, about.st_mtime_ns) == (split.size, split.mtime_ns)


def _shown(schema: pa.Schema | None) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema or ())
