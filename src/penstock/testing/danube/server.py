"""The calls that a test broker answers, and the process that it is."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from danube.proto import DanubeApi_pb2 as messages
from danube.proto import DanubeApi_pb2_grpc as services
from danube.proto.SchemaRegistry_pb2_grpc import add_SchemaRegistryServicer_to_server

from penstock.testing.danube.dispatch import Consumer, Subscription
from penstock.testing.danube.options import Metadata, Options
from penstock.testing.danube.subjects import Subjects
from penstock.testing.danube.topics import Topics, is_name

Code = grpc.StatusCode

MAX_BYTES = 4 * 1024 * 1024
"""The largest call that a real one takes, which answers it in words of its own."""


class Broker(
    services.ProducerServiceServicer,  # type: ignore[misc]
    services.ConsumerServiceServicer,  # type: ignore[misc]
    services.DiscoveryServicer,  # type: ignore[misc]
    services.HealthCheckServicer,  # type: ignore[misc]
):
    """The calls of producers and consumers."""

    def __init__(self, url: str, options: Options, topics: Topics, subjects: Subjects) -> None:
        self.options = options
        self.topics = topics
        self._url = url
        self._subjects = subjects
        self.breaking: asyncio.Event = asyncio.Event()
        self.acking = 0
        self.most_acking = 0
        """So many acknowledgements waited at one time."""
        self.stuck: set[str] = set()
        """Topics that wait for room at a consumer that died: nobody can subscribe until someone reads as that one."""

    async def TopicLookup(self, request: Any, context: Any) -> Any:
        await _require_name(request.topic, context)
        if self.options.redirect:
            kind, url = messages.TopicLookupResponse.Redirect, self.options.redirect
        elif self.topics.find(request.topic) is None:
            await context.abort(Code.NOT_FOUND, f"Unable to find the requested topic: {request.topic}")
        else:
            kind, url = messages.TopicLookupResponse.Connect, self._url
        return messages.TopicLookupResponse(
            request_id=request.request_id, response_type=kind, connect_url=url, broker_url=url
        )

    async def TopicPartitions(self, request: Any, context: Any) -> Any:
        await _require_name(request.topic, context)
        return messages.TopicPartitionsResponse(
            request_id=request.request_id, partitions=self.topics.partitions(request.topic)
        )

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        if request.client == messages.HealthCheckRequest.Producer:
            known = self.topics.of_producer(request.id) is not None
        else:
            known = any(one.id == request.id and one.active for _, one in self.topics.consumers())
        return messages.HealthCheckResponse(status=0 if known else 1)

    async def CreateProducer(self, request: Any, context: Any) -> Any:
        await _require_name(request.topic_name, context)
        await self._require_served(request.topic_name, context)
        reliable = request.dispatch_strategy == messages.Reliable
        subject = request.schema_ref.subject if request.HasField("schema_ref") else ""
        topic = self.topics.find(request.topic_name)
        if topic is None and not self.options.auto_create:
            await context.abort(Code.NOT_FOUND, f"Unable to find the topic: {request.topic_name}")
        namespace = request.topic_name.split("/")[1]
        if topic is None and self.options.namespaces and namespace not in self.options.namespaces:
            what = f"Unable to find the namespace {namespace}, the topic can be created only for an existing namespace"
            await context.abort(Code.UNAVAILABLE, what)
        if topic is not None:
            if topic.reliable != reliable:
                what = "Producer requested dispatch strategy does not match topic strategy"
                await context.abort(Code.FAILED_PRECONDITION, what)
            bound = self.topics.facts(topic.name)["subject"]
            if subject and bound and bound != subject:
                what = f"Topic '{topic.name}' uses schema subject '{bound}', cannot use '{subject}'."
                await context.abort(Code.FAILED_PRECONDITION, what)
        if subject and not self._subjects.has(subject):
            await context.abort(Code.FAILED_PRECONDITION, f"Failed to assign schema '{subject}': register it first")
        is_new = topic is None
        topic = self.topics.get(request.topic_name, reliable, subject)
        if is_new and self.options.is_cluster:
            await context.abort(Code.UNAVAILABLE, "The topic metadata was created, need to redo the lookup")
        if subject:
            self.topics.facts(topic.name)["subject"] = subject
        return messages.ProducerResponse(
            request_id=request.request_id,
            producer_id=self.topics.producer(topic, request.producer_name),
            producer_name=request.producer_name,
        )

    async def SendMessage(self, request: Any, context: Any) -> Any:
        named = request.msg_id.topic_name
        if self.topics.find(named) is None:
            what = f"Unable to publish the message: Topic {named} not found in registry"
            await context.abort(Code.PERMISSION_DENIED, what)
        topic = self.topics.of_producer(request.msg_id.producer_id)
        if topic is None or topic.name != named:
            what = f"The producer with id {request.msg_id.producer_id} does not exist"
            await context.abort(Code.NOT_FOUND, what)
            return None
        if (size := request.ByteSize()) > MAX_BYTES:
            what = f"Error, decoded message length too large: found {size} bytes, the limit is: {MAX_BYTES} bytes"
            await context.abort(Code.OUT_OF_RANGE, what)
        if why := self._subjects.refusal(topic.name, request):
            await context.abort(Code.PERMISSION_DENIED, f"Unable to publish the message: {why}")
        topic.publish(request, self.topics)
        return messages.MessageResponse(request_id=request.request_id)

    async def Subscribe(self, request: Any, context: Any) -> Any:
        await _require_name(request.topic_name, context)
        await self._require_served(request.topic_name, context)
        while request.topic_name in self.stuck:
            await asyncio.sleep(0.01)
        topic = self.topics.find(request.topic_name)
        if topic is None:
            await context.abort(Code.NOT_FOUND, f"Unable to find the topic: {request.topic_name}")
            return None
        filters = list(request.key_filters)
        found = topic.subscribe(
            request.subscription, request.subscription_type, request.consumer_name, filters, self.topics
        )
        if isinstance(found, str):
            await context.abort(Code.PERMISSION_DENIED, f"Not able to subscribe to {topic.name} due to {found}")
            return None
        return messages.ConsumerResponse(
            request_id=request.request_id, consumer_id=found.id, consumer_name=request.consumer_name
        )

    async def ReceiveMessages(self, request: Any, context: Any) -> AsyncIterator[Any]:
        found = next((pair for pair in self.topics.consumers() if pair[1].id == request.consumer_id), None)
        if found is None:
            await context.abort(Code.NOT_FOUND, f"The consumer with the id {request.consumer_id} does not exist")
            return
        subscription, consumer = found
        self.stuck.clear()
        session = consumer.take_over()
        over, broken = consumer.taken_over, self.breaking
        consumer.active = True
        await context.send_initial_metadata(())
        subscription.pump()
        try:
            while True:
                message = await _next(consumer, over, broken)
                if message is None:
                    break
                yield message
        finally:
            if consumer.session == session:
                consumer.active = False
                subscription.retry_now(consumer)
        if broken.is_set():
            await context.abort(Code.UNAVAILABLE, "the connection was broken for a test")

    async def Ack(self, request: Any, context: Any) -> Any:
        subscription = await self._subscription(request, context)
        self.acking += 1
        self.most_acking = max(self.most_acking, self.acking)
        try:
            await asyncio.sleep(self.options.ack_delay_ms / 1000)
        finally:
            self.acking -= 1
        if subscription is not None:
            subscription.ack(request.msg_id.topic_offset)
        return messages.AckResponse(request_id=request.request_id)

    async def Nack(self, request: Any, context: Any) -> Any:
        subscription = await self._subscription(request, context)
        if subscription is not None:
            subscription.nack(request.msg_id.topic_offset, request.delay_ms, request.reason)
        return messages.NackResponse(request_id=request.request_id)

    async def _require_served(self, topic: str, context: Any) -> None:
        if topic in self.topics.unserved:
            what = "The topic exists but is served by another broker, redo the Lookup request"
            await context.abort(Code.UNAVAILABLE, what)

    async def _subscription(self, request: Any, context: Any) -> Subscription | None:
        topic = self.topics.find(request.msg_id.topic_name)
        found = topic.subscriptions.get(request.subscription_name) if topic else None
        if found is None:
            await context.abort(Code.INTERNAL, "Error acknowledging message: Subscription not found")
        return found


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """In front of every call: tokens, and the failures that a test asked for."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.calls: dict[str, int] = {}
        self._failing: dict[str, list[dict[str, Any]]] = {}

    def fail(
        self,
        method: str,
        code: str,
        times: int = 1,
        after: int = 0,
        done: bool = False,
        what: str = "a test asked for it",
    ) -> None:
        """Let the next calls of a method fail, after so many good ones; with `done` the call is carried out before."""
        fault = {"code": code, "times": times, "after": after, "done": done, "what": what}
        self._failing.setdefault(method, []).append(fault)

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        method = details.method.rpartition("/")[2]
        self.calls[method] = self.calls.get(method, 0) + 1
        given = dict(details.invocation_metadata).get("authorization", "")
        if self._options.tokens and given.removeprefix("Bearer ") not in [
            *self._options.tokens,
            *self._options.powerless,
        ]:
            what = "Invalid token" if given else "Authentication credentials are missing"
            return _refusing(method, Code.UNAUTHENTICATED, what)
        if given.removeprefix("Bearer ") in self._options.powerless:
            return _refusing(method, Code.PERMISSION_DENIED, "no binding grants Lookup for service_account:nobody")
        handler = await continuation(details)
        waiting = self._failing.get(method)
        if not waiting:
            return handler
        fault = waiting[0]
        if fault["after"] > 0:
            fault["after"] -= 1
            return handler
        fault["times"] -= 1
        if fault["times"] == 0:
            waiting.pop(0)
        return _refusing(method, Code[fault["code"]], fault["what"], handler if fault["done"] else None)


def _refusing(method: str, code: Any, what: str, handler: Any = None) -> Any:
    async def refuse(request: Any, context: Any) -> Any:
        if handler is not None:
            await handler.unary_unary(request, context)
        await context.abort(code, what)

    async def refuse_stream(request: Any, context: Any) -> Any:
        await context.abort(code, what)
        yield None

    if method == "ReceiveMessages":
        return grpc.unary_stream_rpc_method_handler(
            refuse_stream,
            request_deserializer=messages.ReceiveRequest.FromString,
            response_serializer=lambda each: each.SerializeToString(),
        )
    parse = handler.request_deserializer if handler is not None else lambda data: data
    return grpc.unary_unary_rpc_method_handler(
        refuse, request_deserializer=parse, response_serializer=lambda each: each.SerializeToString()
    )


async def _next(consumer: Consumer, over: asyncio.Event, broken: asyncio.Event) -> Any:
    """The next message of a consumer; None when its stream has to end."""
    if over.is_set() or broken.is_set():
        return None
    if consumer.returned:
        return consumer.returned.pop(0)
    if not consumer.queue.empty():
        return consumer.queue.get_nowait()
    waits = [asyncio.ensure_future(each) for each in (consumer.queue.get(), over.wait(), broken.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not waits[0].done() or waits[0].cancelled():
            return None
        if over.is_set() or broken.is_set():
            consumer.returned.append(waits[0].result())  # the stream that takes its place sends it
            return None
        return waits[0].result()
    finally:
        for each in waits:
            each.cancel()


async def _require_name(topic: str, context: Any) -> None:
    if not is_name(topic):
        what = f"The topic: {topic} has an invalid format, should be: /namespace_name/topic_name"
        await context.abort(Code.INVALID_ARGUMENT, what)


async def serve(port: int, directory: Path, options: Options) -> None:
    """Serve until standard input ends; each line there is a command of the test."""
    metadata = Metadata(directory / "metadata.json")
    topics = Topics(options, metadata, directory)
    subjects = Subjects(metadata, topics)
    scheme = "https" if options.certificate else "http"
    broker = Broker(f"{scheme}://127.0.0.1:{port}", options, topics, subjects)
    gate = Gate(options)
    server = grpc.aio.server(
        interceptors=[gate], options=[("grpc.so_reuseport", 1), ("grpc.max_receive_message_length", -1)]
    )
    services.add_ProducerServiceServicer_to_server(broker, server)
    services.add_ConsumerServiceServicer_to_server(broker, server)
    services.add_DiscoveryServicer_to_server(broker, server)
    services.add_HealthCheckServicer_to_server(broker, server)
    add_SchemaRegistryServicer_to_server(subjects, server)
    server.add_generic_rpc_handlers((subjects.listing(),))
    if options.certificate:
        pair = (Path(options.key).read_bytes(), Path(options.certificate).read_bytes())
        roots = Path(options.client_ca).read_bytes() if options.client_ca else None
        server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([pair], roots, bool(options.client_ca)))
    else:
        server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    beating = asyncio.ensure_future(_beat(topics, options))
    print(json.dumps("ready"), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(_obey(json.loads(line), broker, gate)), flush=True)
    beating.cancel()
    for subscription in topics.subscriptions():
        subscription.flush()
    await server.stop(None)


def _obey(command: dict[str, Any], broker: Broker, gate: Gate) -> Any:
    match command.pop("do"):
        case "report":
            return {"topics": broker.topics.report(), "calls": gate.calls, "most_acking": broker.most_acking}
        case "read":
            topic = broker.topics.find(command["topic"])
            return [each.SerializeToString().hex() for each in topic.log] if topic else []
        case "set":
            for name, value in command.items():
                setattr(broker.options, name, value)
        case "fail":
            gate.fail(**command)
        case "break":
            broken, broker.breaking = broker.breaking, asyncio.Event()
            broken.set()
        case "forget":
            for _, consumer in broker.topics.forget(command["topic"]):
                consumer.queue = asyncio.Queue()  # its stream stays open, and silent
        case "stick":
            broker.stuck.add(command["topic"])
        case "reset":
            broker.topics.reset()
        case "create":
            broker.topics.get(command["topic"], command.get("reliable", True))
    return True


async def _beat(topics: Topics, options: Options) -> None:
    while True:
        await asyncio.sleep(options.heartbeat_ms / 1000)
        for subscription in topics.subscriptions():
            subscription.beat()
