"""
Danube, all against one broker in a process of its own: the source into Delta beside a bare client, the sink beside another.

The broker is the one of the tests, in Python. It may well be what limits all of them: so its CPU time stands beside each
figure, and the CPU time of each client is compared as well. Starting up counts for none: a client is connected, and the first
message has been sent, before its clock begins. The last peer has the shape of Danube Connect's loop: one message of a topic,
then a pause of 100 ms.
"""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, sysconfig.get_path("purelib"))  # a script called danube would hide the package of that name
import pyarrow as pa
from deltalake import DeltaTable
from measure import Bench

from danube_pipe import Pipe
from penstock.connectors.danube.loop import submit
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
Go = Callable[[str], Coroutine[Any, Any, None]]
"""Sends all messages to a topic."""
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


@dataclass
class Spent:
    """What a part took: by the clock, and of CPU for the client and for the broker."""

    wall: float
    cpu: float
    broker: float


class Watch:
    """Begins when it is made."""

    def __init__(self, broker: DanubeBroker, pid: int | None = None) -> None:
        """`pid` is the client's, if it is not this process, whose children do not count."""
        self._client = time.process_time if pid is None else partial(_cpu, pid)
        self._broker = partial(_cpu, broker.pid)
        self._began = self._now()

    def stop(self) -> Spent:
        return Spent(*(after - before for before, after in zip(self._began, self._now(), strict=True)))

    def _now(self) -> tuple[float, float, float]:
        return time.monotonic(), self._client(), self._broker()


async def send_bare(broker: DanubeBroker, topic: str, count: int = ROWS) -> Spent:
    """As many sends at a time as the window allows, and nothing else."""
    async with channel(DanubeConfig(url=broker.url), broker.url, grpc.aio) as link:
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

        await room.acquire()
        await send(0)
        watch = Watch(broker)
        tasks = []
        for at in range(count):
            await room.acquire()
            tasks.append(asyncio.create_task(send(at)))
        await asyncio.gather(*tasks)
        return watch.stop()


def send_by_sink(broker: DanubeBroker, topic: str) -> Spent:
    """The same payloads through a task of the sink."""
    sink = DanubeSink(DanubeSinkConfig(url=broker.url, topic=topic, window=WINDOW))
    epoch = Epoch("bench", "one", 1)
    sink.open()
    sink.begin_epoch(epoch, Task(0))
    sink.write_batch("/bench/rows", _messages(PAYLOADS[:1]))
    sink.flush()
    watch = Watch(broker)
    for first in range(0, ROWS, 5000):
        rows = range(first, min(ROWS, first + 5000))
        sink.write_batch("/bench/rows", _messages([PAYLOADS[at % len(PAYLOADS)] for at in rows]))
    sink.pre_commit(epoch)
    spent = watch.stop()
    sink.close()
    return spent


def _messages(payloads: list[bytes]) -> pa.RecordBatch:
    count = len(payloads)
    return pa.record_batch(
        {
            "key": pa.nulls(count, pa.binary()),
            "payload": pa.array(payloads, pa.binary()),
            "attributes": pa.nulls(count, pa.map_(pa.string(), pa.string())),
            "timestamp": pa.array([0] * count, pa.timestamp("ms", "UTC")),
        }
    )


async def receive_bare(broker: DanubeBroker, topic: str, go: Go) -> Spent:
    """Every message is acknowledged as it comes, without waiting for the answer."""
    async with channel(DanubeConfig(url=broker.url), broker.url, grpc.aio) as link:
        stub = services.ConsumerServiceStub(link)
        request = api.ConsumerRequest(topic_name=topic, consumer_name="bare", subscription="bare")
        call = stub.ReceiveMessages(api.ReceiveRequest(consumer_id=(await stub.Subscribe(request)).consumer_id))
        await call.wait_for_connection()
        await send_bare(broker, topic, 0)
        coming = aiter(call)
        await stub.Ack(api.AckRequest(msg_id=(await anext(coming)).msg_id, subscription_name="bare"))
        await go(topic)
        watch = Watch(broker)
        acks = []
        async for message in coming:
            asked = stub.Ack(api.AckRequest(msg_id=message.msg_id, subscription_name="bare"), timeout=60)
            acks.append(asyncio.ensure_future(_awaited(asked)))
            if len(acks) == ROWS:
                break
        await asyncio.gather(*acks)
        spent = watch.stop()
        call.cancel()
        return spent


async def _awaited(call: Any) -> None:
    await call


def receive_into_delta(broker: DanubeBroker, directory: Path, topic: str, go: Go) -> Spent:
    """A whole pipeline, exactly once, until every row is in the table."""
    pipe = Pipe(directory, "")
    pipe.file.write_text(PIPELINE.format(url=broker.url, topic=topic))
    pipe.start()
    wait_until(lambda: broker.subscription(topic, "bench").get("consumers"), "the subscription")
    submit(send_bare(broker, topic, 0)).result()
    wait_until(lambda: _rows(directory / "lake") == 1, "the first row")
    submit(go(topic)).result()
    watch = Watch(broker, pipe.process.pid)
    while _rows(directory / "lake") < 1 + ROWS:
        time.sleep(0.05)
    spent = watch.stop()
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
    best: dict[str, Spent] = {}

    def keep(what: str, spent: Spent) -> None:
        before = best.get(what, spent)
        pairs = zip(astuple(before), astuple(spent), strict=True)
        best[what] = Spent(*(min(pair) for pair in pairs))

    with (
        DanubeBroker(max_unacked=WINDOW, heartbeat_ms=20, ack_timeout_ms=600_000, live_messages=10 * ROWS) as broker,
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
    ):

        async def go(topic: str) -> None:  # all messages wait at the broker when the clock begins
            broker.tell("set", max_unacked=0)
            await send_bare(broker, topic, ROWS - 1)
            broker.tell("set", max_unacked=WINDOW)

        for turn in range(TURNS):
            keep("bare sends", submit(send_bare(broker, f"/bench/sent-bare-{turn}")).result())
            keep("sink", send_by_sink(broker, f"/bench/sent-{turn}"))
            for kind in ("sent-bare", "sent"):
                assert broker.topic(f"/bench/{kind}-{turn}")["messages"] == 1 + ROWS
            for kind in ("read-bare", "read"):
                broker.tell("create", topic=f"/bench/{kind}-{turn}")
            keep("bare receives", submit(receive_bare(broker, f"/bench/read-bare-{turn}", go)).result())
            keep("source → Delta", receive_into_delta(broker, Path(name, str(turn)), f"/bench/read-{turn}", go))
        received, sent = one_by_one(broker)
    for what, spent in best.items():
        note = f"{ROWS / spent.cpu:,.0f} a CPU second; the broker {spent.broker / spent.wall:.0%} of a core"
        bench.row(what, f"{ROWS / spent.wall:,.0f}/s", note)
    bench.row("one message, then 100 ms", f"{received:.1f}/s", f"sent {sent:.1f}/s")
    for ours, theirs, loop in (("source → Delta", "bare receives", received), ("sink", "bare sends", sent)):
        short = ours.split()[0]
        bench.claim(f"danube_{short}_vs_bare", best[theirs].wall / best[ours].wall, ">=", 0.8)
        bench.row(f"{short} beside the bare client, by CPU", f"{best[theirs].cpu / best[ours].cpu:.2f}")
        bench.claim(f"danube_{short}_vs_loop", ROWS / best[ours].wall / loop, ">=", 10)
    bench.finish()


if __name__ == "__main__":
    main()
