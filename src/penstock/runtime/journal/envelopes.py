"""Messages as rows: how envelopes become Arrow, and come back by stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError, reason_of
from penstock.source import ENVELOPE_SCHEMA, SourceBatch, SourceEnvelope

DEDUPE_KEYS = 100_000


def encode(envelopes: Sequence[SourceEnvelope]) -> pa.RecordBatch:
    """The envelopes as rows of `ENVELOPE_SCHEMA`, column by column."""
    records = [envelope.record for envelope in envelopes]
    attributes = [record.attributes for record in records]
    columns = [
        pa.array([record.stream for record in records], pa.string()),
        pa.array([record.key for record in records], pa.binary()),
        pa.array([record.payload for record in records], pa.binary()),
        pa.MapArray.from_arrays(
            pa.array(accumulate(map(len, attributes), initial=0), pa.int32()),
            pa.array([name for pairs in attributes for name in pairs], pa.string()),
            pa.array([value for pairs in attributes for value in pairs.values()], pa.string()),
        ),
        pa.array([record.timestamp_ms for record in records], pa.int64()).cast(ENVELOPE_SCHEMA.field("timestamp").type),
        _offsets(envelopes),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ENVELOPE_SCHEMA)


def _offsets(envelopes: Sequence[SourceEnvelope]) -> pa.Array:
    kind = ENVELOPE_SCHEMA.field("offset").type
    if all(envelope.offset is None for envelope in envelopes):
        return pa.nulls(len(envelopes), kind)
    offsets = [envelope.offset for envelope in envelopes]
    return pa.array([each and {"partition": each.partition, "value": str(each.value)} for each in offsets], kind)


def placed(batch: SourceBatch) -> pa.RecordBatch:
    """Messages with the offsets that their partition gives them: its own is that of the last one."""
    partition, at = batch.partition, batch.records.schema.get_field_index("offset")
    if partition is None or batch.records.column(at).null_count < batch.num_rows:
        return batch.records
    kind = ENVELOPE_SCHEMA.field("offset").type
    values = [str(partition.offset)] * batch.num_rows
    if isinstance(partition.offset, int):
        values = [str(value) for value in range(partition.offset - batch.num_rows + 1, partition.offset + 1)]
    columns = [pa.repeat(pa.scalar(partition.id, pa.string()), batch.num_rows), pa.array(values, pa.string())]
    return batch.records.set_column(at, "offset", pa.StructArray.from_arrays(columns, fields=list(kind)))


def size_of(envelope: SourceEnvelope) -> int:
    """About the bytes of an envelope; a `DataError` for one that Arrow or JSON could not hold."""
    record = envelope.record
    try:
        size = (
            32 + len(record.stream.encode()) + (memoryview(record.payload).nbytes if record.payload is not None else 0)
        )
        if record.key is not None:
            size += memoryview(record.key).nbytes
        for name, value in record.attributes.items():
            size += 8 + len(name.encode()) + len(value.encode())
        if envelope.dedupe_key is not None:
            size += len(envelope.dedupe_key.encode())
        if size < 1 << 30 and -(1 << 63) <= record.timestamp_ms < 1 << 63:
            return size
    except (TypeError, AttributeError, UnicodeEncodeError) as error:
        raise DataError(
            f"a record of {record.stream!r} cannot be journaled: {reason_of(error)}", code="PEN-3001"
        ) from error
    raise DataError(f"a record of {record.stream!r} is over 1 GiB, or its timestamp out of range", code="PEN-3001")


def by_stream(batch: pa.RecordBatch) -> Iterator[SourceBatch]:
    """Envelopes grouped by stream; within a stream they keep their order, since the sort is stable."""
    if "offset" not in batch.schema.names:  # of a journal that was written before messages had one
        offsets = pa.nulls(batch.num_rows, ENVELOPE_SCHEMA.field("offset").type)
        batch = pa.RecordBatch.from_arrays([*batch.columns, offsets], schema=ENVELOPE_SCHEMA)
    streams = batch.column("stream").dictionary_encode()
    if len(streams.dictionary) > 1:
        batch = batch.take(pc.sort_indices(streams.indices))
    counts = pc.value_counts(streams.indices).field("counts").to_pylist()  # indices are numbered as they appear
    start = 0
    for stream, count in zip(streams.dictionary.to_pylist(), counts, strict=True):
        yield SourceBatch(batch.slice(start, count), stream=stream)
        start += count


class Repeats:
    """Knows the dedupe keys of the last envelopes, and leaves out those that come again."""

    def __init__(self, known: Sequence[str] = ()) -> None:
        self._seen = OrderedDict.fromkeys(known)  # a dict looks for its first key past all that were taken away

    def without(self, envelopes: Sequence[SourceEnvelope]) -> Sequence[SourceEnvelope]:
        """The envelopes whose key is new; from now on it is known."""
        if all(envelope.dedupe_key is None for envelope in envelopes):
            return envelopes
        kept = []
        for envelope in envelopes:
            if envelope.dedupe_key is not None:
                if envelope.dedupe_key in self._seen:
                    continue
                self._seen[envelope.dedupe_key] = None
                if len(self._seen) > DEDUPE_KEYS:
                    self._seen.popitem(last=False)
            kept.append(envelope)
        return kept
