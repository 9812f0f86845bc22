"""What comes before a payload: read and written in bulk, over every shape of Arrow array."""

from __future__ import annotations

import json

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.formats import framing, varint

SHAPES = [pa.binary(), pa.large_binary(), pa.binary_view()]
payload_lists = st.lists(st.none() | st.binary(max_size=20), max_size=12)


@pytest.mark.parametrize("kind", SHAPES)
@given(payload_lists, st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_what_was_framed_comes_back_without_its_frame(kind, values, id, skipped):
    framed = framing.add(pa.array(values, kind).slice(skipped), id)
    ids, bodies = framing.strip(framed)
    wanted = values[skipped:]
    assert ids.tolist() == [-1 if value is None else id for value in wanted]
    assert bodies.to_pylist() == wanted


@pytest.mark.parametrize("kind", SHAPES)
@given(payload_lists, st.integers(0, 3))
def test_what_has_no_whole_prefix_has_no_id_and_no_body(kind, values, skipped):
    ids, bodies = framing.strip(pa.array(values, kind).slice(skipped))
    for value, id, body in zip(values[skipped:], ids.tolist(), bodies.to_pylist(), strict=True):
        if value is not None and len(value) >= 5 and value[0] == 0:
            assert (id, body) == (int.from_bytes(value[1:5], "big"), value[5:])
        else:
            assert (id, body) == (-1, None)


def test_an_empty_batch_has_no_frames():
    for array in (pa.array([], pa.binary()), pa.nulls(0), pa.array([b"x"]).slice(1)):
        ids, bodies = framing.strip(array)
        assert len(ids) == len(bodies) == 0


@given(payload_lists, st.integers(0, 2**64 - 1), st.integers(0, 3))
def test_single_objects_have_their_header(values, fingerprint, skipped):
    framed = framing.add_single_object(pa.array(values, pa.binary()).slice(skipped), fingerprint)
    found, is_framed = framing.fingerprints(framing.cells(framed))
    wanted = values[skipped:]
    assert is_framed.tolist() == [value is not None for value in wanted]
    assert found[is_framed].tolist() == [fingerprint] * int(is_framed.sum())
    bodies = [None if each is None else each[framing.SINGLE_OBJECT :] for each in framed.to_pylist()]
    assert bodies == wanted


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=5), max_size=6))
def test_message_indexes_are_read_as_they_were_written(paths):
    bodies = pa.array([framing.index_bytes(path) + b"\x08\x01" for path in paths], pa.binary())
    which, found, sizes = framing.indexes(framing.cells(bodies))
    assert [found[number] for number in which] == [tuple(path) for path in paths]
    assert sizes.tolist() == [len(framing.index_bytes(path)) for path in paths]


@given(st.lists(st.binary(max_size=8), max_size=8))
def test_random_bytes_are_a_path_within_the_payload_or_none(values):
    which, paths, sizes = framing.indexes(framing.cells(pa.array(values, pa.binary())))
    for value, number, size in zip(values, which.tolist(), sizes.tolist(), strict=True):
        assert size <= len(value)
        assert number < len(paths)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30))
def test_varints_are_read_as_they_were_written(numbers):
    values = np.array(numbers, np.int64)
    written = varint.write(varint.zigzag(values))
    found = framing.cells(written)
    read, sizes = varint.read(found.data, found.starts)
    assert varint.unzigzag(read).tolist() == numbers
    assert sizes.tolist() == found.sizes.tolist()


SCHEMAS = [
    '"int"',
    '{"type": "long", "logicalType": "timestamp-millis"}',
    '["null", {"type": "map", "values": "string"}]',
    json.dumps(
        {
            "type": "record",
            "name": "Order",
            "namespace": "shop",
            "doc": "é",
            "fields": [
                {"name": "id", "type": {"type": "fixed", "name": "Id", "size": 16}, "default": "x"},
                {"name": "again", "type": "Id"},
                {"name": "kind", "type": {"type": "enum", "name": "other.Kind", "symbols": ["A", "B"]}},
                {"name": "kinds", "type": {"type": "array", "items": "other.Kind"}},
            ],
        }
    ),
]


@pytest.mark.parametrize("text", SCHEMAS)
def test_fingerprints_and_canonical_forms_are_those_of_fastavro(text):
    wanted = fastavro.schema.to_parsing_canonical_form(json.loads(text))
    assert framing.canonical(text) == wanted
    number = int.from_bytes(bytes.fromhex(fastavro.schema.fingerprint(wanted, "CRC-64-AVRO")), "little")
    assert framing.fingerprint(text) == number
