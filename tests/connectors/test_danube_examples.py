"""The examples with Danube run: MQTT → Danube, and PostgreSQL → Danube → Delta through one topic."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from brokers import peer
from danube_pipe import Pipe
from mirrored import database_on
from penstock.testing.danube import DanubeBroker
from penstock.testing.mosquitto import Mosquitto, is_installed
from penstock.testing.postgres import PostgresServer, binaries
from penstock.testing.processes import wait_until

pytestmark = pytest.mark.xdist_group("danube")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def broker() -> Iterator[DanubeBroker]:
    with DanubeBroker(heartbeat_ms=20, max_unacked=100, keeps_log=True, live_messages=1_000_000) as running:
        yield running


def example(directory: Path, name: str, broker: DanubeBroker, **changes: str) -> Pipe:
    """The example in a directory of its own; `changes` are settings, by the key that they belong to."""
    text = (EXAMPLES / f"{name}.toml").read_text()
    for key, value in {"danube_service_url": broker.url, **changes}.items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"{key} = "))
        text = text.replace(line, f'{key} = "{value}"')
    place = Path(shutil.copytree(EXAMPLES, directory / name / "examples", ignore=lambda where, names: ["data"]))
    return Pipe(place, text)


def test_measurements_of_mqtt_arrive_in_danube_with_their_schema(
    tmp_path: Path, broker: DanubeBroker, need: Any
) -> None:
    need(is_installed(), "mosquitto is not installed: `make servers` installs it")
    sent = [{"bed": f"b{number % 3}", "celsius": 20.5 + number} for number in range(30)]

    def arrived() -> list[Any]:
        return [each for part in range(2) for each in broker.messages(f"/default/climate-part-{part}")]

    with Mosquitto() as mosquitto, peer(mosquitto) as client:
        pipe = example(tmp_path, "mqtt_to_danube", broker, url=mosquitto.url)
        pipe.run_until(lambda: "beds/+/climate" in (mosquitto.home / "log").read_text(), "the subscription")
        client.publish_all("beds/1/climate", [json.dumps(each).encode() for each in [*sent, {"bed": 1}]])
        pipe.run_until(lambda: len(arrived()) >= len(sent), "all measurements")
    found: dict[str, list[Any]] = {}
    for message in arrived():
        assert (message.schema_id, message.schema_version) == (1, 1)
        found.setdefault(message.routing_key, []).append(json.loads(message.payload))
    assert found == {bed: [each for each in sent if each["bed"] == bed] for bed in ("b0", "b1", "b2")}
    assert broker.topic("/default/climate-part-0")["subject"] == "climate"


def test_a_table_of_postgres_goes_through_danube_and_is_the_same_in_delta(
    tmp_path: Path, broker: DanubeBroker, need: Any
) -> None:
    need(binaries(18), "PostgreSQL 18 is not installed")
    table = tmp_path / "danube_to_delta" / "run" / "danube-to-delta" / "lake" / "default" / "customers"

    def rows() -> list[dict[str, Any]]:
        if not DeltaTable.is_deltatable(str(table)):
            return []
        found = DeltaTable(table).to_pyarrow_table(columns=["id", "name", "points"]).to_pylist()
        return sorted(found, key=lambda row: row["id"])

    with PostgresServer(18, settings={"fsync": "off"}) as server, database_on(server, "danube_chain") as shop:
        shop.run("CREATE TABLE customers (id int8 PRIMARY KEY, name text, points int8)")
        shop.run("INSERT INTO customers SELECT n, 'c' || n, 0 FROM generate_series(1, 50) n")
        broker.tell("create", topic="/default/customers")  # so that the second can subscribe before the first one sends
        second = example(tmp_path, "danube_to_delta", broker)
        second.start()
        topic = "/default/customers"
        wait_until(lambda: broker.subscription(topic, "danube-to-delta").get("consumers"), "the subscription")
        first = example(tmp_path, "postgres_to_danube", broker, dsn=shop.dsn)
        first.start()
        wait_until(lambda: len(rows()) == 50, "the copy")
        first.kill()
        shop.run("UPDATE customers SET points = points + id WHERE id % 2 = 0")
        shop.run("DELETE FROM customers WHERE id <= 5")
        shop.run("UPDATE customers SET id = id + 1000 WHERE id = 7")
        first.start()
        shop.run("INSERT INTO customers VALUES (51, 'late', 1)")
        wanted = sorted(shop.table("customers", "id, name, points"), key=lambda row: row["id"])
        wait_until(lambda: rows() == wanted, "the same table")
        first.stop()
        second.stop()
