"""A bare paho subscriber that counts and drops: `paho_count.py PORT TOPIC COUNT WINDOW`; prints CPU seconds at the end."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties


def main(port: int, topic: str, count: int, window: int) -> None:
    seen, done = 0, threading.Event()

    def heard(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            done.set()

    client = paho.Client(CallbackAPIVersion.VERSION2, "bare", protocol=MQTTProtocolVersion.MQTTv5)
    client.on_message = heard
    client.on_subscribe = lambda *_: print("ready", flush=True)
    wishes = Properties(PacketTypes.CONNECT)
    wishes.ReceiveMaximum = window
    client.connect("127.0.0.1", port, clean_start=True, properties=wishes)
    client.loop_start()
    client.subscribe(topic, 1)
    done.wait()
    print(time.time(), time.process_time(), flush=True)
    client.disconnect()
    client.loop_stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
