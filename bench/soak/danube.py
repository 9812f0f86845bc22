"""
Danube → Penstock → Danube → Penstock, killed again and again beside a broker that crashes: every message arrives once.

A plain producer sends to the first topic, one pipeline relays it to a second one, another pipeline reads that. Kills come
at named steps and at random moments; a crash of the broker loses the cursors of its last seconds, so that it delivers again.
"""

from __future__ import annotations

import json
import os
import random
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, sysconfig.get_path("purelib"))  # a script called danube would hide the package of that name
from measure import PAGE, RESULTS, commit, machine, page

from danube_pipe import Pipe
from penstock.schema.registry.danube_client import grpc
from penstock.testing.danube import DanubeBroker
from penstock.testing.danube.clients import PlainProducer
from penstock.testing.processes import wait_until

ROUNDS = int(os.environ.get("SOAK_KILLS", 30)) // 2
CRASHES = int(os.environ.get("SOAK_CRASHES", 5))
SEED = int(os.environ.get("SOAK_SEED", time.time_ns() % 1_000_000))
RESULT = RESULTS / "soak-danube.json"
FIRST, SECOND = "/default/first", "/default/second"

BROKER = {
    "heartbeat_ms": 50,
    "base_redelivery_delay_ms": 50,
    "max_redelivery_delay_ms": 500,
    "cursor_flush_ms": 2000,
    "ack_timeout_ms": 3000,
    "max_redelivery_count": 100_000,
    "max_unacked": 200,
    "keeps_log": True,
    "live_messages": 1_000_000,
}

RELAY = """
connector_name = "relay"
danube_service_url = "{url}"
[source]
connector = "danube"
topics = ["/default/first"]
subscription = "relay"
[sink]
connector = "danube"
topic = "/default/second"
"""

READER = """
connector_name = "reader"
delivery = "exactly-once"
danube_service_url = "{url}"
[source]
connector = "danube"
topics = ["/default/second"]
subscription = "reader"
[sink]
connector = "penstock.testing:MemorySink"
path = "target"
"""

JOURNAL = ("journal.data", "journal.index", "journal.told")
STEPS = {
    "relay": (*JOURNAL, "plan.after", "stage.middle", "stage.task", "prepare.after", "commit.after", "committed.after"),
    "reader": (*JOURNAL, "plan.after", "stage.task", "prepare.after", "commit.before", "commit.after", "ack.after"),
}


class Sender:
    """Sends numbers until it is stopped, and each again until the broker answered: what counts is what the broker has."""

    def __init__(self, broker: DanubeBroker) -> None:
        self._url = broker.url
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.sent = 0

    def __enter__(self) -> Sender:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        producer: PlainProducer | None = None
        while not self._stopped.wait(0.004):
            try:
                producer = producer or PlainProducer(self._url, FIRST)
                producer.send(str(self.sent).encode(), key=f"key-{self.sent % 50}")
                self.sent += 1
            except grpc.RpcError:
                producer = None


def payloads(broker: DanubeBroker, topic: str) -> Counter[int]:
    return Counter(int(message.payload) for message in broker.messages(topic))


def arrived(reader: Pipe) -> Counter[int]:
    return Counter(int(row["payload"]) for row in reader.rows(SECOND))


def soak(directory: Path) -> dict[str, object]:
    chance = random.Random(SEED)
    kinds: Counter[str] = Counter()
    with DanubeBroker(**BROKER) as broker:
        for topic in (FIRST, SECOND):
            broker.tell("create", topic=topic)
        pipes = {
            name: Pipe(directory / name, text.format(url=broker.url))
            for name, text in (("relay", RELAY), ("reader", READER))
        }
        for name, topic in (("relay", FIRST), ("reader", SECOND)):
            pipes[name].start()
            wait_until(lambda: broker.subscription(topic, name).get("consumers"), name)  # noqa: B023 - waited for at once
        with Sender(broker) as sender:
            for number in range(ROUNDS):
                name = chance.choice(sorted(pipes))
                step, pipe = chance.choice(STEPS[name]), pipes[name]
                time.sleep(chance.uniform(0.2, 3))
                pipe.kill()
                kinds["at random"] += 1
                print(f"  {number + 1}: {name} at {step}, {sender.sent:,} sent", file=sys.stderr, flush=True)
                count = 1 if step.startswith("stage") else chance.randrange(1, 4)  # each task counts from the beginning
                pipe.start(f"{step}=kill@{count}")
                try:
                    assert pipe.wait() == -9
                except AssertionError:
                    report = json.dumps(broker.tell("report"))
                    sys.exit(
                        "\n".join([f"seed {SEED}: {name} was not killed", report, *(p.log() for p in pipes.values())])
                    )
                kinds["at a step"] += 1
                if number % max(1, ROUNDS // CRASHES) == 0 and kinds["crashes of the broker"] < CRASHES:
                    broker.restart()
                    kinds["crashes of the broker"] += 1
                pipe.start()
            while kinds["crashes of the broker"] < CRASHES:
                time.sleep(chance.uniform(0.5, 2))
                broker.restart()
                kinds["crashes of the broker"] += 1
        wanted = payloads(broker, FIRST)
        until = time.monotonic() + 600
        while arrived(pipes["reader"]).total() < wanted.total() and time.monotonic() < until:
            time.sleep(1)
        time.sleep(5)  # what comes twice comes now
        for pipe in pipes.values():
            pipe.stop()
        found, relayed = arrived(pipes["reader"]), payloads(broker, SECOND)
    return {
        "kills": dict(kinds),
        "messages": wanted.total(),
        "repeats in the second topic, which a plain consumer sees": (relayed - wanted).total(),
        "lost": (wanted - found).total(),
        "doubled": (found - wanted).total(),
    }


def main() -> int:
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as name:
        figures = soak(Path(name))
    result = {
        "soak": "danube",
        "seed": SEED,
        "commit": commit(),
        "machine": machine(),
        "seconds": round(time.time() - began),
        **figures,
    }
    RESULT.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    PAGE.write_text(page())
    print(json.dumps(figures))
    return 1 if figures["lost"] or figures["doubled"] else 0


if __name__ == "__main__":
    sys.exit(main())
