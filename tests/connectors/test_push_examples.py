"""The examples of mqtt, tcp and websocket run against their counterparts."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from websockets.sync.server import serve

from brokers import peer
from connectors.pushed import free_port
from connectors.test_http_examples import drained, example, rows
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.testing import ForkEngine
from penstock.testing.mosquitto import Mosquitto, answers, is_installed
from penstock.testing.processes import wait_until


@contextlib.contextmanager
def running(file: Path) -> Iterator[None]:
    """The pipeline of a file, until the block ends; it must end well."""
    stop, ended = threading.Event(), list[Any]()
    pipeline = Pipeline.from_toml(file)
    run = threading.Thread(target=lambda: ended.append(supervisor.run(pipeline, ForkEngine(1), stop=stop)))
    run.start()
    try:
        yield
    finally:
        stop.set()
        run.join(60)
    assert len(ended) == 1


def test_the_mqtt_example_keeps_states_and_alarms(tmp_path: Path, need: Callable[[bool, str], None]) -> None:
    need(is_installed(), "mosquitto is not installed: `make servers` installs it")
    with Mosquitto() as broker, peer(broker) as sender:
        file = example(tmp_path, "mqtt.toml", "mqtt://127.0.0.1:1883", broker.url)
        lake = tmp_path / "run" / "mqtt" / "lake"
        with running(file):
            wait_until(lambda: "SUBACK" in broker.log(), "the subscription")
            sender.publish_all("sensors/a/state", [b'{"id": 1, "value": 21.5}', b'{"id": 2, "value": 22.5}'])
            sender.publish_all("alarms", [b'{"id": 3, "what": "smoke"}'], qos=2)
            states = [{"id": 1, "value": 21.5}, {"id": 2, "value": 22.5}]
            wait_until(lambda: rows(lake / "sensors" / "a") == states, "the states")
            wait_until(lambda: rows(lake / "alarms") == [{"id": 3, "what": "smoke"}], "the alarm")


def test_the_example_of_the_mqtt_sink_sends_the_rows_of_files(
    tmp_path: Path, need: Callable[[bool, str], None]
) -> None:
    need(is_installed(), "mosquitto is not installed: `make servers` installs it")
    with Mosquitto() as broker, peer(broker) as listener:
        listener.listen("events/#")
        file = example(tmp_path, "files_to_mqtt.toml", "mqtt://127.0.0.1:1883", broker.url)
        assert drained(file).rows_out == 12
        assert drained(file).rows_in == 0
        wait_until(lambda: len(listener.heard) >= 12, "all messages")
        rows = [(name, json.loads(payload), user) for name, payload, _, user in listener.heard]
    assert sorted(row["id"] for _, row, _ in rows) == list(range(12))
    assert all([("kind", name.removeprefix("events/"))] == user and "kind" not in row for name, row, user in rows)


def test_the_tcp_example_says_what_is_on_disk(tmp_path: Path) -> None:
    port = free_port()
    file = example(tmp_path, "tcp.toml", "127.0.0.1:9000", f"127.0.0.1:{port}")
    with running(file):
        wait_until(lambda: answers(port), "the server")
        with socket.create_connection(("127.0.0.1", port), 60) as sock:
            sock.sendall(b'{"id": 1}\n{"id": 2}\n')
            told = sock.makefile()
            while int(told.readline()) < 2:
                pass
        wait_until(lambda: rows(tmp_path / "run" / "tcp" / "lake" / "lines") == [{"id": 1}, {"id": 2}], "the lines")


def test_the_websocket_example_subscribes_and_keeps_what_comes(tmp_path: Path) -> None:
    def feed(connection: Any) -> None:
        for text in connection:
            assert json.loads(text) == {"op": "subscribe", "channel": "trades"}
            for id in (1, 2):
                connection.send(json.dumps({"id": id, "price": 9.5}))

    with serve(feed, "127.0.0.1", 0) as server:
        listening = threading.Thread(target=server.serve_forever)
        listening.start()
        try:
            port = server.socket.getsockname()[1]
            file = example(tmp_path, "websocket.toml", "127.0.0.1:9001", f"127.0.0.1:{port}")
            lake = tmp_path / "run" / "websocket" / "lake" / "trades"
            with running(file):
                trades = [{"id": 1, "price": 9.5}, {"id": 2, "price": 9.5}]
                wait_until(lambda: rows(lake) == trades, "the trades")
        finally:
            server.shutdown()
            listening.join()
