"""A Mosquitto for the tests of a module, a client of the tests' own, and certificates."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from penstock.testing.mosquitto import Mosquitto
from penstock.testing.processes import wait_until


class Peer:
    """Publishes and listens by paho as it comes, over a connection of its own."""

    def __init__(self, port: int, client_id: str = "") -> None:
        self.heard: list[tuple[str, bytes, bool, list[tuple[str, str]]]] = []
        self._client = paho.Client(CallbackAPIVersion.VERSION2, client_id, protocol=MQTTProtocolVersion.MQTTv5)
        self._client.max_queued_messages_set(0)
        self._client.on_message = self._on_message
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        wait_until(self._client.is_connected, "the test's client to connect")

    def publish(self, topic: str, payload: bytes | str, qos: int = 1, retain: bool = False, **user: str) -> Any:
        """Send one; it is the broker's once `wait_for_publish` of what is returned has come back."""
        properties = Properties(PacketTypes.PUBLISH)
        if user:
            properties.UserProperty = list(user.items())
        return self._client.publish(topic, payload, qos, retain, properties)

    def publish_all(self, topic: str, payloads: list[bytes], qos: int = 1) -> None:
        for sent in [self.publish(topic, payload, qos) for payload in payloads]:
            sent.wait_for_publish(60)

    def listen(self, filter: str, qos: int = 2) -> None:
        done: list[Any] = []
        self._client.on_subscribe = lambda *given: done.append(given)
        self._client.subscribe(filter, qos)
        wait_until(lambda: bool(done), "the subscription")

    def payloads(self) -> list[bytes]:
        return [payload for _, payload, _, _ in self.heard]

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _on_message(self, client: Any, data: Any, message: Any) -> None:
        user = getattr(message.properties, "UserProperty", [])
        self.heard.append((message.topic, message.payload, message.retain, user))


@contextlib.contextmanager
def peer(broker: Mosquitto) -> Iterator[Peer]:
    found = Peer(broker.port)
    try:
        yield found
    finally:
        found.close()


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [json.dumps({"id": number}).encode() for number in range(start, start + count)]


class Certificates:
    """Two authorities, a server's certificate for `localhost` and clients' of either; made by openssl."""

    def __init__(self, home: Path) -> None:
        self.home = home
        for authority in ("ca", "other"):
            self._run(
                f"req -x509 -newkey rsa:2048 -nodes -keyout {authority}.key -out {authority}.pem -subj /CN={authority}"
            )
        self._signed("server", "ca", "localhost", "subjectAltName=DNS:localhost")
        self._signed("misnamed", "ca", "elsewhere", "subjectAltName=DNS:elsewhere")
        self._signed("client", "ca", "penstock")
        self._signed("stranger", "other", "stranger")

    def __getitem__(self, name: str) -> Path:
        return self.home / name

    def _signed(self, name: str, authority: str, common: str, extension: str = "") -> None:
        self._run(f"req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj /CN={common}")
        (self.home / "extensions").write_text(extension)
        self._run(
            f"x509 -req -in {name}.csr -CA {authority}.pem -CAkey {authority}.key -CAcreateserial -out {name}.pem -days 3650 "
            "-extfile extensions"
        )

    def _run(self, words: str) -> None:
        subprocess.run(["openssl", *words.split()], cwd=self.home, check=True, capture_output=True)
