"""`penstock peek` of a topic, wherever its sink keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from confluent_kafka import Producer

import s3_targets
from penstock.pipeline import Pipeline
from penstock.sink import Epoch, Task
from penstock.testing.kafka import KafkaServer
from penstock.testing.postgres import PostgresServer
from penstock.testing.s3 import S3Server

HEAD = 'connector_name = "p"\n[source]\nconnector = "generator"\n[sink]\n'


def written(file: Path, sink: str, *epochs: pa.RecordBatch) -> Path:
    """A pipeline file, and some epochs of /shop/orders in its sink."""
    file.write_text(HEAD + sink)
    (made,) = Pipeline.from_toml(file).sinks.values()
    made.open()
    for number, batch in enumerate(epochs, 1):
        epoch = Epoch("p", "i", number)
        made.begin_epoch(epoch, Task(0))
        made.write_batch("/shop/orders", batch)
        made.flush()
        made.commit_epoch(epoch, [made.pre_commit(epoch)], {})
    made.close()
    return file


EPOCHS = pa.record_batch({"id": [1, 2]}), pa.record_batch({"id": [3], "note": ["x"]})


def peeked(cli: Any, *words: object) -> list[Any]:
    code, out, err = cli("peek", *words, "--json")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("connector", ["delta", "iceberg", "files"])
def test_a_table_in_an_object_store(cli: Any, tmp_path: Path, s3: S3Server, connector: str) -> None:
    s3_targets.note(tmp_path, s3)
    where, options = s3_targets.at(tmp_path)
    written_as = ", ".join(
        f"{name} = {{ env = {json.dumps(value['env'])} }}"
        if isinstance(value, dict)
        else f"{name} = {json.dumps(value)}"
        for name, value in options.items()
    )
    sink = f'connector = "{connector}"\npath = "{where}/{{topic}}"\nstorage_options = {{ {written_as} }}\n'
    if connector == "iceberg":
        sink += f'catalog_uri = "sqlite:///{tmp_path}/catalog.db"\n'
    file = written(tmp_path / "p.toml", sink, *EPOCHS)
    found = peeked(cli, "/shop/orders", file, "--rows", "10")
    assert sorted(row["id"] for row in found) == [1, 2, 3]
    assert {row["note"] for row in found} == {None, "x"}
    assert len(peeked(cli, "/shop/orders", file, "--rows", "1")) == 1
    code, out, _ = cli("peek", file, "/shop/orders")  # in either order
    assert (code, where in out) == (0, True)
    assert peeked(cli, f"{where}/shop/orders", file, "--rows", "10") == found, "by its address"
    assert peeked(cli, file, f"{where}/shop/orders", "--rows", "10") == found
    code, _, err = cli("peek", f"{where}/shop/orders")
    assert (code, f"penstock peek {where}/shop/orders pipeline.toml" in err) == (2, True)
    code, _, err = cli("peek", "/shop/none", file)
    assert code == 2
    assert f"{where}/shop/none" in err


@pytest.mark.parametrize("connector", ["delta", "files"])
def test_the_oldest_rows_come_first(cli: Any, tmp_path: Path, connector: str) -> None:
    sink = f'connector = "{connector}"\npath = "{tmp_path}/lake/{{topic}}"\n'
    file = written(tmp_path / "p.toml", sink, *EPOCHS)
    assert [row["id"] for row in peeked(cli, "/shop/orders", file, "--rows", "2")] == [1, 2]


def test_a_local_iceberg_table_is_read_by_its_catalog_alone(cli: Any, tmp_path: Path) -> None:
    file = written(tmp_path / "p.toml", f'connector = "iceberg"\npath = "{tmp_path}/lake/{{topic}}"\n', *EPOCHS)
    where = tmp_path / "lake" / "shop" / "orders"
    assert sorted(row["id"] for row in peeked(cli, where, file)) == [1, 2, 3]
    code, _, err = cli("peek", where)
    assert (code, "only its catalog knows its rows" in err) == (2, True), "files of old snapshots are no rows"


def test_a_table_of_postgresql(cli: Any, tmp_path: Path, server: PostgresServer) -> None:
    sink = f'connector = "postgres"\ndsn = "{server.dsn}"\ntable = "t{uuid4().hex[:10]}"\n'
    file = written(tmp_path / "p.toml", sink, *EPOCHS)
    assert sorted(row["id"] for row in peeked(cli, "/shop/orders", file)) == [1, 2, 3]
    assert len(peeked(cli, "/shop/orders", file, "--rows", "2")) == 2


def test_a_topic_of_kafka_without_rows_that_are_not_committed(cli: Any, tmp_path: Path, kafka: KafkaServer) -> None:
    name = f"peek-{uuid4().hex[:8]}"
    sink = f'connector = "kafka"\nbootstrap_servers = "{kafka.bootstrap}"\ntopic = "{name}"\n'
    sink += 'key = ["id"]\npartitions = 2\n'
    file = written(tmp_path / "p.toml", sink, *EPOCHS)
    other = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name})
    other.init_transactions()
    other.begin_transaction()
    other.produce(name, b'{"id": 4}')
    other.flush()
    found = peeked(cli, "/shop/orders", file)
    other.abort_transaction()
    assert sorted(json.loads(row["value"])["id"] for row in found) == [1, 2, 3]
    assert {row["key"] for row in found} == {"1", "2", "3"}
    assert len(peeked(cli, "/shop/orders", file, "--rows", "1")) == 1


def test_a_sink_that_cannot_be_looked_into_says_so(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(HEAD + 'connector = "console"\n')
    code, _, err = cli("peek", "/orders", tmp_path / "p.toml")
    assert code == 2
    assert "cannot be looked into" in err
    code, _, err = cli("peek", "/orders", tmp_path / "p.toml", "--sink", "nobody")
    assert (code, "nobody" in err) == (2, True)
