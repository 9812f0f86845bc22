"""A query whose columns change between epochs: only its tasks know the schema, and the route's policy holds there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_sql_changes import change, run, table

from penstock.runtime.epochs import State
from penstock.schema.evolution import Policy

REST = "_op, _position, _unchanged, _old_key FROM input"
NARROW = f"SELECT id, name, CAST(age AS INT) AS age, {REST}"
WIDE = f"SELECT id, name, age, CASE WHEN id = 3 THEN 'x' END AS note, {REST}"


@pytest.mark.parametrize("policy", [Policy.EVOLVE, Policy.DISCARD_ROW])
def test_the_columns_of_a_query_are_followed_by_the_policy_of_its_route(
    spark: Any, tmp_path: Path, policy: Policy
) -> None:
    first = [change("c", 1, 30)]
    second = [change("c", 2, 1 << 40), change("c", 3, 5), change("u", 1, 6), change("d", 4, 1 << 40)]
    run(spark, tmp_path, NARROW, first)
    run(spark, tmp_path, WIDE, first, second, schema_evolution=policy)
    newest = State(tmp_path / "state", "sql-changes").peek().newest
    assert newest is not None
    if policy is Policy.EVOLVE:
        assert table(tmp_path) == {1: ("name-1", 6), 2: ("name-2", 1 << 40), 3: ("name-3", 5)}
        assert newest.discarded == {}
    else:
        assert table(tmp_path) == {1: ("name-1", 6)}
        assert newest.discarded == {"table": {"/people": 2}, "log": {"/people": 2}}
