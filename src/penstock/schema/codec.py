"""An Arrow schema as text, for receipts, ledgers, inventories and journals: the IPC message in base64."""

from __future__ import annotations

import base64

import pyarrow as pa


def pack_schema(schema: pa.Schema) -> str:
    """The schema as ASCII text, its metadata included."""
    return base64.b64encode(schema.serialize()).decode()


def unpack_schema(text: str) -> pa.Schema:
    """The schema that `pack_schema` wrote."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
