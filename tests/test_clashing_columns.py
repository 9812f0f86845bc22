"""Tasks of one epoch that take columns, each for itself, which a target cannot have together."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

import test_messages
from penstock.connectors.postgres.fit import MOST_COLUMNS, refuse_columns
from penstock.errors import ConnectorError, SchemaError
from penstock.pipeline.routing import partition_of
from penstock.runtime.messages.clashes import ITEMS, Filled, clashing, having, leaves, only
from penstock.schema.evolution import Policy
from test_messages import NUMBERED, PIPELINE, Home
from thorough import few


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return Home(tmp_path)


def numbered(home: Home, *odd: dict[str, Any], count: int = 20) -> None:
    """Messages that alternate between the shapes."""
    home.put(*({"id": at, **odd[at % len(odd)]} for at in range(count)))


def lost(home: Home) -> list[int]:
    return sorted(json.loads(letter["payload"])["id"] for letter in home.letters())


def iceberg(home: Home, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(test_messages, "PIPELINE", PIPELINE.replace('"delta"', '"iceberg"'))
    return f'table = "n.{{topic}}"\ncatalog_uri = "sqlite:///{home.path}/catalog.db"'


def iceberg_rows(home: Home) -> list[dict[str, Any]]:
    catalog = load_catalog("default", type="sql", uri=f"sqlite:///{home.path}/catalog.db")
    rows: list[dict[str, Any]] = catalog.load_table("n.a").scan().to_arrow().to_pylist()
    return rows


def killed(home: Home, how: str) -> None:
    """A run in a process of its own, since a client of Delta does not outlive a fork; it is killed on its way."""
    file = home.path / "pipeline.toml"
    home.pipeline(partitions=4)
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(how=how), str(file)], cwd=Path(__file__).parent, check=False
    )
    assert done.returncode == -signal.SIGKILL


RUN = """
import os, signal, sys
from penstock import failpoints
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.runtime.epochs.state import State
from penstock.testing.engine import ForkEngine
{how}
supervisor.run(Pipeline.from_toml(sys.argv[1]), ForkEngine(2), drain=True)
"""

DIE_BETWEEN = """
save = State.save
def fatal(state, manifest):
    saved = save(state, manifest)
    if manifest.barred:
        os.kill(os.getpid(), signal.SIGKILL)
    return saved
State.save = fatal
"""


OFTEN = [({"s": [{"v": 1}]}, {"s": [{"V": 1}]}), ({"v": 1}, {"v": 2, "w": 1}, {"W": 3}, {"V": 4})]
"""The deepest of the clashes and the widest; `make soak NAME=tests` tries the others."""


def filled(rows: list[dict[str, Any]], *columns: str) -> list[int]:
    """The rows with values in one of the columns."""
    return sorted(row["id"] for row in rows if any(row.get(name) is not None for name in columns))


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(odd, marks=() if odd in OFTEN else pytest.mark.soak)
        for odd in (
            ({"v": 1}, {"V": 1}),
            ({"s": {"v": 1}}, {"s": {"V": 1}}),
            ({"s": [{"v": 1}]}, {"s": [{"V": 1}]}),
            ({"w": 1, "v": 1}, {"w": 2, "V": 1}),
            ({"v": 1}, {"V": {"x": 1}}),
            ({"v": 1}, {"v": 2, "w": 1}, {"W": 3}, {"V": 4}),
        )
    ],
    ids=json.dumps,
)
def test_names_that_differ_in_case_only_between_tasks_make_letters_and_every_other_row_arrives(
    home: Home, odd: tuple[dict[str, Any], ...]
) -> None:
    numbered(home, *odd)
    home.run(partitions=4)
    rows, letters = [row["id"] for row in home.rows()], lost(home)
    assert sorted(rows + letters) == [*range(20)]  # each once: a row or a letter
    assert rows
    assert letters
    for id in letters:
        assert not set(home.rows()[0]).issuperset(odd[id % len(odd)]) or "s" in odd[0]
    home.put({"id": 20})
    home.run(partitions=4)
    assert sorted([row["id"] for row in home.rows()] + lost(home)) == [*range(21)]


@pytest.mark.parametrize("odd", [({"a": {"b": 1}}, {"a.b": 1}), ({"a.b": 1}, {"a": {"b": {"c": 1}}})], ids=json.dumps)
def test_paths_that_meet_in_iceberg_between_tasks_make_letters_and_every_other_row_arrives(
    home: Home, monkeypatch: pytest.MonkeyPatch, odd: tuple[dict[str, Any], ...]
) -> None:
    sink = iceberg(home, monkeypatch)
    numbered(home, *odd)
    home.run(partitions=4, sink=sink)
    rows, letters = [row["id"] for row in iceberg_rows(home)], lost(home)
    assert sorted(rows + letters) == [*range(20)]
    assert len({id % 2 for id in letters}) == 1
    assert filled(iceberg_rows(home), "a", "a.b") == sorted(rows)


def test_values_of_types_that_no_column_can_have_between_tasks_make_letters(home: Home) -> None:
    numbered(home, {"v": 1}, {"v": {"x": 1}})
    home.run(partitions=4)
    assert sorted([row["id"] for row in home.rows()] + lost(home)) == [*range(20)]
    assert lost(home)


def test_a_kill_between_the_two_stages_changes_neither_rows_nor_letters(home: Home, tmp_path: Path) -> None:
    numbered(home, {"v": 1}, {"V": 1})
    killed(home, DIE_BETWEEN)
    home.run(partitions=4)
    other = Home(tmp_path / "other")
    other.path.mkdir()
    numbered(other, {"v": 1}, {"V": 1})
    other.run(partitions=4)
    assert (home.rows(), lost(home)) == (other.rows(), lost(other))
    assert sorted([row["id"] for row in home.rows()] + lost(home)) == [*range(20)]


def split_up(home: Home, lanes: int = 4) -> list[int]:
    """Messages of two names, of which no task gets both; the ids of those that do not come in the first task."""
    keys = pa.RecordBatch.from_pydict({"id": pa.array(range(20), pa.int64())})
    where = partition_of(keys, ["id"], lanes).tolist()
    home.put(*({"id": at, "Vv"[lane % 2]: at} for at, lane in enumerate(where)))
    return [at for at, lane in enumerate(where) if lane % 2]


@pytest.mark.parametrize("sink", ['mode = "append"', 'mode = "upsert"', 'schema_evolution = "discard_row"'])
def test_the_columns_of_the_first_task_are_the_ones_that_stay(home: Home, sink: str) -> None:
    second = split_up(home)
    home.run(NUMBERED, partitions=4, sink=sink)
    assert home.rows() == sorted(({"id": at, "V": at} for at in {*range(20)}.difference(second)), key=repr)
    assert lost(home) == second
    assert {(letter["code"], letter["rule"]) for letter in home.letters()} == {("PEN-4001", "sink")}


def test_only_the_sink_that_has_no_place_for_a_column_goes_without_its_rows(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = f'table = "n.{{{{topic}}}}"\ncatalog_uri = "sqlite:///{home.path}/catalog.db"'
    ice = f'[[sinks]]\nname = "ice"\nconnector = "iceberg"\npath = "ice/{{{{topic}}}}"\n{catalog}\n'
    sinks = PIPELINE.replace("[sink]", '[[sinks]]\nname = "lake"') + ice
    monkeypatch.setattr(test_messages, "PIPELINE", sinks)
    second = split_up(home)
    home.run(partitions=4)
    assert sorted(row["id"] for row in iceberg_rows(home)) == [*range(20)]
    assert sorted(row["id"] for row in home.rows()) == sorted({*range(20)}.difference(second))
    assert {letter["sink"] for letter in home.letters()} == {"lake"}
    assert lost(home) == second


@pytest.mark.parametrize("step", few(["stage.after", "prepare.after", "commit.before", "commit.after"]))
def test_a_kill_after_the_second_stage_loses_and_doubles_nothing(home: Home, step: str) -> None:
    second = split_up(home)

    killed(home, f"failpoints.arm('{step}=kill')")
    home.run(partitions=4)
    assert lost(home) == second
    assert sorted(row["id"] for row in home.rows()) == sorted({*range(20)}.difference(second))


def test_a_run_that_keeps_no_letters_says_which_column_has_no_place(home: Home) -> None:
    second = split_up(home)
    for _ in range(2):
        with pytest.raises(ConnectorError, match="has no place for v beside") as failed:
            home.run(partitions=4, on_error="stop")
        assert failed.value.code == "PEN-4001"
    home.run(partitions=4)  # now it may keep them
    assert lost(home) == second
    assert len(home.rows()) == 20 - len(second)


def test_columns_are_found_and_left_out_by_their_paths() -> None:
    rows = pa.RecordBatch.from_pylist(
        [
            {"v": 1, "s": {"x": None, "y": 2}, "l": [{"a": 1, "b": None}, {"a": None, "b": 2}]},
            {"v": None, "s": None, "l": []},
            {"v": None, "s": {"x": None, "y": None}, "l": [{"a": 1, "b": None}]},
        ]
    )
    filled = Filled()
    filled.note(rows.slice(2))
    assert filled.paths == [("l", ITEMS, "a")]
    filled.note(rows)
    assert set(filled.paths) == {("l", ITEMS, "a"), ("v",), ("s", "y"), ("l", ITEMS, "b")}
    assert leaves(rows.schema) == [("v",), ("s", "x"), ("s", "y"), ("l", ITEMS, "a"), ("l", ITEMS, "b")]
    assert having(rows, [("s", "y"), ("l", ITEMS, "b"), ("gone",)]).tolist() == [True, False, False]
    assert having(rows.slice(1), [("l", ITEMS, "a")]).tolist() == [False, True]
    assert only(rows.schema, [("l", ITEMS, "b"), ("s", "y")]) == pa.schema(
        [("s", pa.struct([("y", pa.int64())])), ("l", pa.list_(pa.struct([("b", pa.int64())])))]
    )


def test_what_a_target_refuses_for_itself_is_left_to_the_tasks() -> None:
    schema = pa.schema([(name, pa.int64()) for name in ("id", "v", "V", "w", "bad")])

    def check(columns: pa.Schema) -> None:
        names = columns.names
        if "bad" in names or "id" not in names or len({name.lower() for name in names}) < len(names):
            raise SchemaError("no")

    tasks = [[("id",), ("v",)], [("id",), ("V",), ("w",), ("bad",)]]
    assert clashing(check, schema, tasks, {"id"}) == [("V",)]
    assert clashing(check, schema, tasks[::-1], {"id"}) == [("v",)]


def test_columns_that_are_too_many_for_one_table_are_those_of_the_later_task() -> None:
    first, second = ([(f"{letter}{at}",) for at in range(count)] for letter, count in (("a", 900), ("b", 705)))
    schema = pa.schema([(name, pa.int64()) for (name,) in [*first, *second]])
    check = partial(refuse_columns, "t", target=None, policy=Policy.EVOLVE)
    assert clashing(check, schema, [first, second], ()) == second[MOST_COLUMNS - 900 :]
