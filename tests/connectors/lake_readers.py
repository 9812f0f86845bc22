"""Engines that read a Delta table with its deletion vectors; none of them is ours."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyarrow import types


def table_of(path: Path | str) -> pa.Table:
    """All rows, by the client's query engine."""
    found = pa.table(QueryBuilder().register("t", DeltaTable(str(path))).execute("select * from t"))
    plain = [each.with_type(pa.string()) if types.is_string_view(each.type) else each for each in found.schema]
    plain = [each.with_type(pa.binary()) if types.is_binary_view(each.type) else each for each in plain]
    return found.cast(pa.schema(plain))
