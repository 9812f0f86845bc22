"""The kit's broker: real, and it can be stopped, killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.testing.kafka import SOON_BACK, KafkaServer
from penstock.testing.processes import wait_until


def test_what_was_written_survives_a_clean_stop_and_a_kill(kafka_installed: None) -> None:
    with KafkaServer(settings=SOON_BACK) as server:
        address = server.bootstrap
        admin = AdminClient({"bootstrap.servers": address})
        admin.create_topics([NewTopic("numbers", 1, 1)])["numbers"].result()
        for number, how in enumerate(("clean", "kill")):
            producer = Producer({"bootstrap.servers": address})
            producer.produce("numbers", str(number).encode())
            assert producer.flush(60) == 0
            server.restart(how)
            assert server.bootstrap == address
            assert _values(address) == [str(n).encode() for n in range(number + 1)]


def test_a_broker_goes_with_the_process_that_started_it(kafka_installed: None) -> None:
    script = "from penstock.testing.kafka import KafkaServer; s = KafkaServer(); s.start(); print(s.pid, flush=True); input()"
    starter = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    assert os.path.exists(f"/proc/{pid}")
    starter.send_signal(signal.SIGKILL)
    starter.wait(60)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the broker to go")


def _values(address: str) -> list[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "test",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition("numbers", 0, 0)])
    found: list[bytes] = []

    def whole() -> bool:
        message = consumer.poll(0.1)
        if message is None:
            return False
        if message.error():
            return True
        found.append(message.value())
        return False

    wait_until(whole, "the end of the topic")
    consumer.close()
    return found
