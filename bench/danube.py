"""
Danube, all against one broker in a process of its own: the source into Delta beside a bare client, the sink beside another.

The broker is the one of the tests, in Python, so that rates are far below those of a real one, and the same for all. The
last peer has the shape of Danube Connect's loop: one message of a topic, then a pause of 100 ms.
"""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, sysconfig.get_path("purelib"))  # a script called danube would hide the package of that name
import pyarrow as pa
from deltalake import DeltaTable
from measure import Bench

from danube_pipe import Pipe
from penstock.connectors.danube.sink import DanubeSink, DanubeSinkConfig
from penstock.schema.registry.danube_client import DanubeConfig, api, channel, grpc, services
from penstock.sink import Epoch, Task
from penstock.testing.danube import DanubeBroker
from penstock.testing.danube.clients import PlainConsumer, PlainProducer
from penstock.testing.processes import wait_until

ROWS = int(os.environ.get("BENCH_ROWS", "20000"))
TURNS = 2
WINDOW = 1000
SLOW = 30
PAYLOADS = [os.urandom(100).hex().encode() for _ in range(1000)]

PIPELINE = """
connector_name = "bench"
delivery = "exactly-once"
danube_service_url = "{url}"
[source]
connector = "danube"
topics = ["{topic}"]
subscription = "bench"
[sink]
connector = "delta"
path = "lake"
"""


async def send_bare(url: str, topic: str) -> None:
    """As many sends at a time as the window allows, and nothing else."""
    async with channel(DanubeConfig(url=url), url, grpc.aio) as link:
        stub = services.ProducerServiceStub(link)
        request = api.ProducerRequest(producer_name="bare", topic_name=topic, dispatch_strategy=api.Reliable)
        number = (await stub.CreateProducer(request)).producer_id
        room = asyncio.Semaphore(WINDOW)

        async def send(at: int) -> None:
            place = api.MsgID(producer_id=number, topic_name=topic)
            payload = PAYLOADS[at % len(PAYLOADS)]
            now = time.time_ns() // 1_000_000
            message = api.StreamMessage(
                request_id=at, msg_id=place, payload=payload, publish_time=now, producer_name="bare"
            )
            try:
                await stub.SendMessage(message, timeout=60)
            finally:
                room.release()

        tasks = []
        for at in range(ROWS):
            await room.acquire()
            tasks.append(asyncio.create_task(send(at)))
        await asyncio.gather(*tasks)


def send_by_sink(url: str, topic: str) -> None:
    """The same payloads through a task of the sink."""
    sink = DanubeSink(DanubeSinkConfig(url=url, topic=topic, window=WINDOW))
    epoch = Epoch("bench", "one", 1)
    sink.open()
    sink.begin_epoch(epoch, Task(0))
    for first in range(0, ROWS, 5000):
        count = min(5000, ROWS - first)
        envelopes = {
            "key": pa.nulls(count, pa.binary()),
            "payload": pa.array([PAYLOADS[at % len(PAYLOADS)] for at in range(first, first + count)], pa.binary()),
            "attributes": pa.nulls(count, pa.map_(pa.string(), pa.string())),
            "timestamp": pa.array([0] * count, pa.timestamp("ms", "UTC")),
        }
        sink.write_batch("/bench/rows", pa.record_batch(envelopes))
    sink.pre_commit(epoch)
    sink.close()


async def receive_bare(url: str, topic: str, go: Callable[[], None]) -> tuple[float, float]:
    """Every message is acknowledged as it comes, without waiting for the answer. Seconds by the clock and of CPU."""
    async with channel(DanubeConfig(url=url), url, grpc.aio) as link:
        stub = services.ConsumerServiceStub(link)
        request = api.ConsumerRequest(topic_name=topic, consumer_name="bare", subscription="bare")
        call = stub.ReceiveMessages(api.ReceiveRequest(consumer_id=(await stub.Subscribe(request)).consumer_id))
        await call.wait_for_connection()
        await asyncio.to_thread(go)
        began, cpu = time.monotonic(), time.process_time()
        acks = []
        async for message in call:
            asked = stub.Ack(api.AckRequest(msg_id=message.msg_id, subscription_name="bare"), timeout=60)
            acks.append(asyncio.ensure_future(_awaited(asked)))
            if len(acks) == ROWS:
                break
        await asyncio.gather(*acks)
        spent = time.monotonic() - began, time.process_time() - cpu
        call.cancel()
        return spent


async def _awaited(call: Any) -> None:
    await call


def receive_into_delta(
    broker: DanubeBroker, directory: Path, topic: str, go: Callable[[], None]
) -> tuple[float, float]:
    """A whole pipeline, exactly once, until every row is in the table."""
    pipe = Pipe(directory, "")
    pipe.file.write_text(PIPELINE.format(url=broker.url, topic=topic))
    pipe.start()
    wait_until(lambda: broker.subscription(topic, "bench").get("consumers"), "the subscription")
    go()
    began, cpu = time.monotonic(), _cpu(pipe.process.pid)
    while _rows(directory / "lake") < ROWS:
        time.sleep(0.05)
    spent = time.monotonic() - began, _cpu(pipe.process.pid) - cpu
    pipe.stop()
    return spent


def _rows(path: Path) -> int:
    if not DeltaTable.is_deltatable(str(path)):
        return 0
    return int(pa.table(DeltaTable(path).get_add_actions())["num_records"].to_numpy().sum())


def _cpu(pid: int) -> float:
    """CPU seconds of a process and all that it started."""
    parents: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        parents[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return sum(spent for each, (_, spent) in parents.items() if pid in _line(each, parents))


def _line(pid: int, parents: dict[int, tuple[int, float]]) -> list[int]:
    found = [pid]
    while (above := parents.get(found[-1], (0, 0))[0]) and above not in found:
        found.append(above)
    return found


def one_by_one(broker: DanubeBroker) -> tuple[float, float]:
    """Messages a second of a loop with pauses, for a source and for a sink."""
    topic = "/bench/slow"
    with PlainProducer(broker.url, topic) as producer, PlainConsumer(broker.url, topic) as consumer:
        began = time.monotonic()
        for at in range(SLOW):
            producer.send(PAYLOADS[at])
            time.sleep(0.1)
        sent = SLOW / (time.monotonic() - began)
        began = time.monotonic()
        for _ in range(SLOW):
            consumer.next()
            time.sleep(0.1)
        return SLOW / (time.monotonic() - began), sent


def main() -> None:
    bench = Bench("danube", f"Danube, {ROWS:,} messages of 200 bytes, the broker of the tests on the same machine")
    best: dict[str, tuple[float, float]] = {}

    def keep(what: str, wall: float, cpu: float) -> None:
        before = best.get(what, (wall, cpu))
        best[what] = min(wall, before[0]), min(cpu, before[1])

    with (
        DanubeBroker(max_unacked=WINDOW, heartbeat_ms=20, ack_timeout_ms=600_000) as broker,
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
    ):
        for turn in range(TURNS):
            senders: dict[str, Callable[[str], None]] = {
                "bare sends": lambda topic: asyncio.run(send_bare(broker.url, topic)),
                "sink": lambda topic: send_by_sink(broker.url, topic),
            }
            for what, send in senders.items():
                topic = f"/bench/{what.replace(' ', '-')}-{turn}"
                began, cpu = time.monotonic(), time.process_time()
                send(topic)
                keep(what, time.monotonic() - began, time.process_time() - cpu)
                assert broker.topic(topic)["messages"] == ROWS
            for what in ("bare receives", "source → Delta"):
                topic = f"/bench/{'bare' if what.startswith('bare') else 'ours'}-{turn}"
                broker.tell("create", topic=topic)

                def go(topic: str = topic) -> None:  # all messages wait at the broker when the clock begins
                    broker.tell("set", max_unacked=0)
                    asyncio.run(send_bare(broker.url, topic))
                    broker.tell("set", max_unacked=WINDOW)

                if what == "bare receives":
                    keep(what, *asyncio.run(receive_bare(broker.url, topic, go)))
                else:
                    keep(what, *receive_into_delta(broker, Path(name, str(turn)), topic, go))
        received, sent = one_by_one(broker)
    for what, (wall, cpu) in best.items():
        bench.row(what, f"{ROWS / wall:,.0f}/s", f"{ROWS / cpu:,.0f} a CPU second")
    bench.row("one message, then 100 ms", f"{received:.1f}/s", f"sent {sent:.1f}/s")
    for ours, theirs, loop in (("source → Delta", "bare receives", received), ("sink", "bare sends", sent)):
        short = ours.split()[0]
        bench.claim(f"danube_{short}_vs_bare", best[theirs][0] / best[ours][0], ">=", 0.8)
        bench.row(f"{short} beside the bare client, by CPU", f"{best[theirs][1] / best[ours][1]:.2f}")
        bench.claim(f"danube_{short}_vs_loop", ROWS / best[ours][0] / loop, ">=", 10)
    bench.finish()


if __name__ == "__main__":
    main()
