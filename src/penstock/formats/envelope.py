"""Decoded change envelopes to rows with our change columns, all at once."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.changes import CHANGE_FIELDS, Op
from penstock.formats import Failed
from penstock.formats.exact import FIRST_SECOND, LAST_SECOND
from penstock.formats.inference import Misfit, combine, fit, kind_of, type_of
from penstock.formats.json_parse import value
from penstock.formats.json_text import objects
from penstock.formats.pieces import record_batch

Mask = npt.NDArray[np.bool_]

PLACEHOLDER = b"__debezium_unavailable_value"
_PLACEHOLDERS = [PLACEHOLDER.decode(), base64.b64encode(PLACEHOLDER).decode()]

MAX_SCHEMAS = 32
"""Schema parts of a batch that are taken off together; payloads with others are read one by one."""

_RESERVED = frozenset(field.name for field in CHANGE_FIELDS)

_POSITIONS = (
    ("position",),
    ("lsn",),
    ("file", "pos", "row"),
    ("commit_lsn", "change_lsn", "event_serial_no"),
    ("ts_ms",),
)
"""What orders the changes of a source, by the first of these that its connector gives."""


def bare(payloads: pa.Array) -> pa.Array:
    """
    The envelopes without their schema part: `{"schema": …, "payload": {…}}` is its payload; others stay as they are.

    One whose payload is `null` is a tombstone, like a message without a payload.
    """
    payloads = payloads.cast(pa.large_binary()).cast(pa.binary())
    waiting = pc.fill_null(pc.match_substring_regex(payloads, r'^\s*\{\s*"(schema|payload)"'), False)
    if not waiting.true_count:
        return payloads
    texts = _without_schemas(payloads, np.flatnonzero(waiting.to_numpy(zero_copy_only=False)))
    is_gone = pc.and_(waiting, pc.fill_null(pc.match_substring_regex(texts, r"^\s*null\s*$"), False))
    return pc.if_else(is_gone, pa.scalar(None, texts.type), texts) if is_gone.true_count else texts


def _without_schemas(payloads: pa.Array, left: npt.NDArray[np.int64]) -> pa.Array:
    texts = payloads
    for _ in range(MAX_SCHEMAS):
        if not len(left):
            return texts
        some = payloads.take(pa.array(left))
        head = _head(some[0].as_py())
        if head is None:
            break
        has_head = pc.and_(pc.starts_with(some, head), pc.ends_with(some, b"}")).to_numpy(zero_copy_only=False)
        cut = pc.binary_slice(some.filter(pa.array(has_head)), len(head), -1)
        texts = _put(texts, left[has_head], cut)
        left = left[~has_head]
    alone = [_alone(each) for each in payloads.take(pa.array(left)).to_pylist()]
    return _put(texts, left, pa.array(alone, pa.binary()))


def _head(payload: bytes) -> bytes | None:
    """What comes before the payload's value, if it is the last member."""
    try:
        text = payload.decode()
        decoder = json.JSONDecoder()
        at = text.index(":") + 1
        at += len(text[at:]) - len(text[at:].lstrip())
        _, end = decoder.raw_decode(text, at)
        rest = text[end:].lstrip()
        if not rest.startswith(",") or not rest[1:].lstrip().startswith('"payload"'):
            return None
        colon = text.index(":", text.index('"payload"', end))
    except (ValueError, RecursionError):
        return None
    return text[: colon + 1].encode()


def _alone(payload: bytes) -> bytes:
    try:
        found = value(payload)
    except (Misfit, RecursionError):
        return payload  # what is wrong with it is said when it is decoded
    if not {"schema", "payload"} <= found.keys():
        return payload
    return json.dumps(found["payload"], ensure_ascii=False).encode("utf-8", "surrogatepass")


def _put(texts: pa.Array, places: npt.NDArray[np.int64], values: pa.Array) -> pa.Array:
    if not len(places):
        return texts
    index = np.arange(len(texts))
    index[places] = len(texts) + np.arange(len(places))
    return pa.concat_arrays([texts, values]).take(pa.array(index))


class Envelopes:
    """Envelopes of a batch, and which of them are tombstones."""

    def __init__(self, found: pa.RecordBatch, is_tombstone: Mask, known: pa.Schema | None) -> None:
        self.count = found.num_rows
        self.found, self.is_tombstone, self.known = found, is_tombstone, known
        self.bad: Failed = {}
        ops = self._column("op")
        self.ops = ops.cast(pa.string()) if types.is_string(ops.type) else pa.nulls(self.count, pa.string())
        self.before, self.after = self._image("before"), self._image("after")
        self.is_delete = self._is_op(Op.DELETE) | is_tombstone

    def rows(self, key: pa.RecordBatch, names: Sequence[str], *, same_keys: bool) -> tuple[pa.RecordBatch, Failed]:
        """Rows of all envelopes, and those that are none; the values of those mean nothing. `same_keys`: other keys are bad."""
        if same_keys:
            self._refuse_other_keys(key, names)
        key = key.select([each for each in names if each in key.schema.names])
        own = self._own()
        columns = self._with_keys(own, key)
        self._check(columns, names, key)
        unchanged = self._unchanged(columns)
        self._fail(
            self._is_op(Op.INSERT, Op.SEEDED) & unchanged.is_valid().to_numpy(zero_copy_only=False),
            "debezium.incomplete",
            "a new row without all its values, as Debezium writes a row that got another key; "
            "ALTER TABLE … REPLICA IDENTITY FULL at the source",
        )
        described = [
            pc.if_else(pa.array(self.is_tombstone), Op.DELETE.value, pc.fill_null(self.ops, "")),
            self._positions(),
            self._ints("txId"),
            self._committed(),
            unchanged,
            self._old_keys(own, names),
        ]
        fields = [pa.field(name, array.type) for name, array in columns.items()]
        schema = pa.schema([*fields, *(each.with_nullable(True) for each in CHANGE_FIELDS)])
        return record_batch([*columns.values(), *described], schema, self.count), self.bad

    def _column(self, name: str) -> pa.Array:
        at = self.found.schema.get_field_index(name)
        return self.found.column(at) if at >= 0 else pa.nulls(self.count)

    def _image(self, name: str) -> pa.StructArray:
        column = self._column(name)
        if types.is_struct(column.type):
            return self._without_reserved(column)
        return pa.Array.from_buffers(pa.struct([]), self.count, [pa.py_buffer(bytes(self.count // 8 + 1))])

    def _without_reserved(self, image: pa.StructArray) -> pa.StructArray:
        """The row without columns that have the name of one of ours; a row with a value there has no place for it."""
        fields = list(zip(image.type, image.flatten(), strict=True))
        reserved = [(field, values) for field, values in fields if field.name in _RESERVED]
        for field, values in reserved:
            is_there = values.is_valid().to_numpy(zero_copy_only=False)
            self._fail(
                is_there, "debezium.reserved", f"the row has a column {field.name}, which describes the change here"
            )
        if not reserved:
            return image
        kept = [each for each in fields if each[0].name not in _RESERVED]
        mask = image.is_null() if image.null_count else None
        return pa.StructArray.from_arrays(
            [values for _, values in kept], fields=[field for field, _ in kept], mask=mask
        )

    def _is_op(self, *ops: Op) -> Mask:
        found: Mask = pc.fill_null(pc.is_in(self.ops, pa.array(ops, pa.string())), False).to_numpy(zero_copy_only=False)
        return found

    def _own(self) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """The rows before and after, with the same columns: a type that only the other has is the other's."""
        images = [_flat(self.before), _flat(self.after)]
        names = list(
            dict.fromkeys([*(self.known.names if self.known else ()), *images[1].schema.names, *images[0].schema.names])
        )
        fields = []
        for name in names:
            kinds = [each.schema.field(name).type if name in each.schema.names else pa.null() for each in images]
            fields.append(pa.field(name, _wider(name, *kinds)))
        schema = pa.schema(fields)
        return fit(images[0], schema), fit(images[1], schema)

    def _with_keys(self, own: tuple[pa.RecordBatch, pa.RecordBatch], key: pa.RecordBatch) -> dict[str, pa.Array]:
        """The row after the change, of a delete the row before it; of neither, what the message's key says."""
        before, after = own
        choice = pa.array(self.is_delete)
        columns = {name: _chosen(choice, before.column(name), after.column(name)) for name in after.schema.names}
        for name, values in zip(key.schema.names, key.columns, strict=True):
            if name not in columns:
                columns[name] = pa.nulls(self.count, values.type)
            if types.is_null(columns[name].type):
                columns[name] = pa.nulls(self.count, values.type)
            fitting = _as_column(values, columns[name].type)
            if fitting is not None:
                is_missing = pc.and_(columns[name].is_null(), choice)
                columns[name] = _chosen(is_missing, fitting, columns[name])
        return columns

    def _refuse_other_keys(self, key: pa.RecordBatch, names: Sequence[str]) -> None:
        """A message whose own key has other fields is another table's, or was keyed by hand."""
        valid = {
            field.name: values.is_valid().to_numpy(zero_copy_only=False)
            for field, values in zip(key.schema, key.columns, strict=True)
        }
        nobody = np.zeros(self.count, bool)
        more = np.logical_or.reduce([nobody, *(found for name, found in valid.items() if name not in names)])
        some = np.logical_or.reduce([nobody, *valid.values()])
        whole = np.logical_and.reduce([~nobody, *(valid.get(name, nobody) for name in names)])
        self._fail(more | (some & ~whole), "debezium.key", f"its key has other fields than {', '.join(names)}")

    def _check(self, columns: dict[str, pa.Array], names: Sequence[str], key: pa.RecordBatch) -> None:
        real = ~self.is_tombstone
        known = self._is_op(*Op)
        self._fail(
            real & ~self.ops.is_valid().to_numpy(zero_copy_only=False),
            "debezium.envelope",
            "no `op`: no change envelope",
        )
        self._fail(real & ~known, "debezium.op", "an `op` that is none of c, u, d, r, t")
        has_after = self.after.is_valid().to_numpy(zero_copy_only=False)
        has_before = self.before.is_valid().to_numpy(zero_copy_only=False)
        wants_after = self._is_op(Op.INSERT, Op.UPDATE, Op.SEEDED)
        self._fail(real & wants_after & ~has_after, "debezium.envelope", "a change without its row in `after`")
        has_key = np.zeros(self.count, bool)
        if names and set(names) <= set(columns):
            has_key = np.logical_and.reduce([columns[n].is_valid().to_numpy(zero_copy_only=False) for n in names])
        self._fail(
            self.is_tombstone & ~has_key, "debezium.tombstone", "a tombstone without a key that says whose it is"
        )
        gone = real & self.is_delete & ~has_before
        self._fail(gone & ~has_key, "debezium.envelope", "a delete without its row in `before`, nor a key")

    def _fail(self, is_bad: Mask, rule: str, reason: str) -> None:
        for at in np.flatnonzero(is_bad):
            self.bad.setdefault(int(at), (rule, reason))

    def _unchanged(self, columns: dict[str, pa.Array]) -> pa.Array:
        """Which columns a change left as they were; they become null."""
        masks: dict[str, Mask] = {}
        for name, array in columns.items():
            if types.is_string(array.type):
                mask = pc.is_in(array, pa.array(_PLACEHOLDERS))
            elif types.is_binary(array.type):
                mask = pc.is_in(array, pa.array([PLACEHOLDER]))
            elif types.is_list(array.type) and types.is_string(array.type.value_type):
                mask = _is_placeholder_list(array)
            else:
                continue
            found: Mask = pc.fill_null(mask, False).to_numpy(zero_copy_only=False)
            if found.any():
                masks[name] = found
                columns[name] = _chosen(pa.array(found), pa.nulls(len(array), array.type), array)
        kind = CHANGE_FIELDS[4].type
        if not masks:
            return pa.nulls(self.count, kind)
        table = np.array(list(masks.values()))
        counts = table.sum(axis=0)
        _, which = np.nonzero(table.T)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        values = pa.array(list(masks), pa.string()).take(pa.array(which))
        return pa.ListArray.from_arrays(offsets, values, type=kind, mask=pa.array(counts == 0))

    def _source(self, name: str) -> pa.Array:
        source = self._column("source")
        at = source.type.get_field_index(name) if types.is_struct(source.type) else -1
        return source.flatten()[at] if at >= 0 else pa.nulls(self.count)

    def _ints(self, name: str) -> pa.Array:
        found = self._source(name)
        return found.cast(pa.int64()) if types.is_integer(found.type) else pa.nulls(self.count, pa.int64())

    def _committed(self) -> pa.Array:
        found = self._source("ts_ms")
        if types.is_timestamp(found.type):
            return found.cast(pa.timestamp("us", "UTC"))
        if not types.is_integer(found.type):
            return pa.nulls(self.count, pa.timestamp("us", "UTC"))
        earliest, latest = FIRST_SECOND * 1000, LAST_SECOND * 1000 + 999
        inside = pc.and_(pc.greater_equal(found, earliest), pc.less_equal(found, latest))
        inside = pc.and_(inside, pc.not_equal(found, 0))
        return pc.multiply(pc.if_else(inside, found.cast(pa.int64()), None), 1000).cast(pa.timestamp("us", "UTC"))

    def _positions(self) -> pa.Array:
        """
        Text that sorts in the order of the changes.

        What has none of its own has that of the change before it, and the first of a batch that of the change after it: one
        of no position at all would come before changes of earlier batches.
        """
        source = self._column("source")
        names = [each.name for each in source.type] if types.is_struct(source.type) else []
        chosen = next((each for each in _POSITIONS if each[0] in names), ())
        parts = [_sortable(self._source(name)) for name in chosen if name in names]
        if not parts:
            return pa.array([""] * self.count, pa.string())
        first = parts[0]
        rest = [pc.fill_null(each, "") for each in parts[1:]]
        joined = pc.binary_join_element_wise(first, *rest, ".") if rest else first
        return pc.fill_null(pc.fill_null_backward(pc.fill_null_forward(joined)), "")

    def _old_keys(self, own: tuple[pa.RecordBatch, pa.RecordBatch], names: Sequence[str]) -> pa.Array:
        """Of updates that moved a row, the key it had."""
        before, after = own
        nothing = pa.nulls(self.count, pa.string())
        if not names or not set(names) <= set(after.schema.names):
            return nothing
        has_old = self.before.is_valid().to_numpy(zero_copy_only=False) & self._is_op(Op.UPDATE)
        differs = np.zeros(self.count, bool)
        for name in names:
            old, new = before.column(name), after.column(name)
            if types.is_nested(old.type) or types.is_null(old.type):
                continue
            has_old = has_old & old.is_valid().to_numpy(zero_copy_only=False)
            differs |= pc.fill_null(pc.not_equal(old, new), False).to_numpy(zero_copy_only=False)
        moved = has_old & differs
        if not moved.any():
            return nothing
        texts = objects(list(names), [before.column(name) for name in names], self.count)
        return pc.if_else(pa.array(moved), texts, None)


def _flat(image: pa.StructArray) -> pa.RecordBatch:
    return record_batch(image.flatten(), pa.schema(list(image.type)), len(image))


def _wider(name: str, before: pa.DataType, after: pa.DataType) -> pa.DataType:
    if before.equals(after) or types.is_null(before) or types.is_null(after):
        return before if types.is_null(after) else after
    return type_of(combine(kind_of(after, name), kind_of(before, name)), after)


def can_meet(found: pa.RecordBatch) -> bool:
    """True if every column of the row has one type before and after, or one that widens to the other."""
    images = [found.schema.field(name).type for name in ("before", "after") if name in found.schema.names]
    if len(images) < 2 or not all(map(types.is_struct, images)):
        return True
    try:
        combine(kind_of(images[0], "before"), kind_of(images[1], "after"))
    except Misfit:
        return False
    return True


def _as_column(values: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """Values of a key in the type of their column: a number is the same with and without a fraction. None: they are not."""
    if values.type.equals(kind):
        return values
    if not all(types.is_integer(each) or types.is_floating(each) for each in (values.type, kind)):
        return None
    cast = values.cast(kind, safe=False)
    is_same = pc.equal(cast.cast(values.type, safe=False), values)
    inside = pc.less_equal(pc.abs(values.cast(pa.float64(), safe=False)), float(1 << 53))
    return pc.if_else(pc.and_(is_same, inside), cast, pa.scalar(None, kind))


def _chosen(choice: pa.Array, yes: pa.Array, no: pa.Array) -> pa.Array:
    """As `if_else`, for any type."""
    if not pc.any(choice).as_py():
        return no
    index = np.arange(len(no))
    mask = choice.to_numpy(zero_copy_only=False)
    index[mask] += len(no)
    return pa.concat_arrays([no, yes]).take(pa.array(index))


def _is_placeholder_list(array: pa.ListArray) -> pa.Array:
    """Lists of one value, the placeholder."""
    is_one = pc.fill_null(pc.equal(pc.list_value_length(array), 1), False).to_numpy(zero_copy_only=False)
    mask = np.zeros(len(array), bool)
    if is_one.any():
        values = array.filter(pa.array(is_one)).flatten()
        mask[is_one] = pc.is_in(values, pa.array(_PLACEHOLDERS)).to_numpy(zero_copy_only=False)
    return pa.array(mask)


def _sortable(values: pa.Array) -> pa.Array:
    if types.is_integer(values.type):
        return pc.utf8_lpad(values.cast(pa.string()), 20, "0")
    if not types.is_string(values.type):
        return pa.nulls(len(values), pa.string())
    return pc.if_else(pc.match_substring_regex(values, r"^\d+$"), pc.utf8_lpad(values, 20, "0"), values)
