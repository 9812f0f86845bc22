"""Send rows to a web API."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, Self
from urllib.parse import quote

import httpx
import pyarrow as pa
from pydantic import PositiveInt, model_validator

from penstock.connectors.http_client import PASSING, HttpConfig, client, drain, failure, passing, pause_of
from penstock.connectors.messages import Template, encode, text_column
from penstock.errors import DataError
from penstock.sink import Epoch, Receipt, SinkConnector, SinkContext, Task, Topic, WriteResult

LONGEST_PAUSE_SECS = 60.0

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class HttpSinkConfig(HttpConfig):
    method: Literal["POST", "PUT", "PATCH"] = "POST"
    """The method of requests. `url` may hold `{topic}` (without its first slash) and `{column}`."""

    batch_rows: PositiveInt = 1
    """Rows in one request at most; 1: one request for each row."""

    batch_bytes: PositiveInt = 1 << 20
    """Payloads of more bytes than this start another request."""

    batch_format: Literal["json_array", "ndjson"] = "json_array"
    """How several rows are written into one body, if `batch_rows` is not 1."""

    content_type: str | None = None
    """The header Content-Type; none: `application/json`, or `application/x-ndjson` for lines of it."""

    attributes: tuple[str, ...] = ()
    """Columns that travel as headers instead of in the body; only where each row is a request."""

    key_header: str = "Idempotency-Key"
    """The header that holds the idempotency key: the same if an epoch is sent again, another for every other row."""

    max_inflight: PositiveInt = 8
    """Requests at a time for each task. With 1, rows of a task arrive in their order."""

    max_tries: PositiveInt = 5
    """How often a request is tried that is answered 429 or 5xx, after the pause that `Retry-After` asks for; then the epoch
    waits and is sent again."""

    @model_validator(mode="after")
    def _has_place_for_attributes(self) -> Self:
        if self.attributes and self.batch_rows > 1:
            raise ValueError("attributes are headers of a row's own request: leave them out, or batch_rows")
        return self


@dataclass(frozen=True)
class Call:
    """One request: rows of the batch, and what is sent for them."""

    url: str
    rows: Sequence[int]
    payloads: Sequence[bytes]
    headers: Sequence[tuple[str, str]] = ()

    def halves(self) -> tuple[Call, Call]:
        middle = len(self.rows) // 2
        return (
            Call(self.url, self.rows[:middle], self.payloads[:middle], self.headers),
            Call(self.url, self.rows[middle:], self.payloads[middle:], self.headers),
        )


class HttpSink(SinkConnector[HttpSinkConfig, Receipt]):
    """
    A row, or a batch of rows, is a request; the body is encoded by the topic's `[[schemas]]`, else as JSON.

    At-least-once: rows are sent while their epoch is staged, and an epoch that is staged again is sent again. Each request
    has an idempotency key by which the receiver can drop repeats: of pipeline, epoch, task and content, so it never names
    two different bodies, and equal rows have different ones. Rows that are answered 4xx are bad data, and the rows of a
    refused batch are sent in halves until the bad ones are found; 429 and 5xx are tried again.
    """

    name = "http"

    def __init__(self, config: HttpSinkConfig) -> None:
        super().__init__(config)
        self._template = Template(config.url, "url")
        self._client: httpx.Client | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._scope = ""
        self._seen: Counter[bytes] = Counter()  # how often this task has sent the same

    def open(self, context: SinkContext = SinkContext()) -> None:
        self.close()
        super().open(context)
        self._client = client(self.config, self.config.max_inflight)
        self._pool = ThreadPoolExecutor(self.config.max_inflight, thread_name_prefix="http-sink")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._client is not None:
            self._client.close()
        self._client = self._pool = None

    def begin_epoch(self, epoch: Epoch, task: Task) -> None:
        self._scope = f"{epoch.pipeline}\n{epoch.incarnation}\n{epoch.number}\n{task.partition}"
        self._seen.clear()

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        """Send the rows, and wait until each request is answered."""
        assert self._pool is not None
        calls = list(self._calls(topic, batch))
        keyed = [(call, self._key(topic, call)) for call in calls]
        refused: dict[int, int] = {}
        for found in self._pool.map(lambda each: self._send(topic, *each), keyed):
            refused |= found
        if refused:
            statuses = ", ".join(map(str, sorted(set(refused.values()))))
            error = DataError(f"{len(refused)} rows were refused by {self.config.url}, with {statuses}")
            error.rows, error.count, error.others_written = sorted(refused), len(refused), True
            raise error
        return WriteResult(batch.num_rows, sum(len(payload) for call in calls for payload in call.payloads))

    def _calls(self, topic: Topic, batch: pa.RecordBatch) -> Iterator[Call]:
        """The rows as requests, in their order for each address."""
        urls = self._urls(topic, batch)
        attributes = self.config.attributes
        messages = list(encode(batch, self.context.topic(topic), attributes=attributes).triples())
        if self.config.batch_rows == 1:
            for row, (_, payload, pairs) in enumerate(messages):
                yield Call(urls[row], (row,), (payload or b"",), _headers(pairs))
            return
        by_url: dict[str, list[int]] = defaultdict(list)
        for row, url in enumerate(urls):
            by_url[url].append(row)
        for url, rows in by_url.items():
            yield from self._batches(url, rows, [messages[row][1] or b"null" for row in rows])

    def _batches(self, url: str, rows: Sequence[int], payloads: Sequence[bytes]) -> Iterator[Call]:
        start = size = 0
        for at, payload in enumerate(payloads):
            if at > start and (at - start >= self.config.batch_rows or size + len(payload) > self.config.batch_bytes):
                yield Call(url, rows[start:at], payloads[start:at])
                start, size = at, 0
            size += len(payload)
        if start < len(rows):
            yield Call(url, rows[start:], payloads[start:])

    def _urls(self, topic: Topic, batch: pa.RecordBatch) -> list[str]:
        """The address of each row; values in it are quoted, so that none can change its path."""
        for name in dict.fromkeys(self._template.columns):
            at = batch.schema.get_field_index(name)
            if at >= 0:
                texts = text_column(batch.column(at), name).to_pylist()
                quoted = pa.array([each if each is None else quote(each, safe="") for each in texts], pa.string())
                batch = batch.set_column(at, name, quoted)
        return self._template.names(topic, batch).to_pylist()  # type: ignore[no-any-return]

    def _key(self, topic: Topic, call: Call) -> str:
        """
        The idempotency key of a request.

        It is made of the content and not of a row's place, since a task that runs again may meet its rows in another order:
        a receiver that drops a known key must never drop what it has not seen.
        """
        content = sha256("\n".join((self.context.name, self._scope, topic, call.url)).encode())
        for payload in call.payloads:
            content.update(b"%d\n" % len(payload) + payload)
        digest = content.digest()
        self._seen[digest] += 1
        return sha256(digest + b"%d" % self._seen[digest]).hexdigest()[:32]

    def _send(self, topic: Topic, call: Call, key: str) -> dict[int, int]:
        """Send one request; returns the status of each row that was refused."""
        status = self._status(call, key)
        if status < 300:
            return {}
        if len(call.rows) == 1:
            return {call.rows[0]: status}
        found: dict[int, int] = {}
        for number, half in enumerate(call.halves()):  # each half has a key that follows from the whole's
            found |= self._send(topic, half, sha256(f"{key}{number}".encode()).hexdigest()[:32])
        return found

    def _status(self, call: Call, key: str) -> int:
        """The status of an answer that says something about the rows; all others are errors."""
        config, own = self.config, self._client
        assert own is not None
        headers = [("Content-Type", self._content_type()), *call.headers, (config.key_header, key)]
        for tried in range(1, config.max_tries + 1):
            try:
                with own.stream(config.method, call.url, content=self._body(call), headers=headers) as answer:
                    drain(answer, config.timeout_secs)
            except httpx.HTTPError as error:
                raise passing(error, f"sending to {config.url}") from error
            except (httpx.InvalidURL, UnicodeEncodeError):
                return 400  # a value makes an address or a header that cannot be sent
            status = answer.status_code
            if status not in PASSING and status < 500:
                break
            if tried < config.max_tries:
                pause = pause_of(answer)
                time.sleep(min(LONGEST_PAUSE_SECS, 0.2 * 2**tried if pause is None else pause))
        else:
            raise failure(answer, f"{config.method} {config.url}")
        if status < 300 or (400 <= status < 500 and not self._is_of_all(status)):
            return status
        raise failure(answer, f"{config.method} {config.url}")

    def _is_of_all(self, status: int) -> bool:
        """True if the answer is about credentials or the address, and not about single rows."""
        return status in (401, 403, 407) or (status in (404, 405, 410) and not self._template.columns)

    def _body(self, call: Call) -> bytes:
        if self.config.batch_rows == 1:
            return call.payloads[0]
        if self.config.batch_format == "ndjson":
            return b"".join(payload + b"\n" for payload in call.payloads)
        return b"[" + b",".join(call.payloads) + b"]"

    def _content_type(self) -> str:
        if self.config.content_type is not None:
            return self.config.content_type
        lines = self.config.batch_rows > 1 and self.config.batch_format == "ndjson"
        return "application/x-ndjson" if lines else "application/json"


def _headers(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Attributes as headers; what a header cannot hold is quoted, and names that are none are left out."""
    return [
        (name, _header_value(value)) for name, value in pairs if _TOKEN.fullmatch(name) and name.lower() not in _OWN
    ]


_OWN = frozenset({"content-type", "content-length", "transfer-encoding", "host", "connection", "authorization"})


def _header_value(value: str) -> str:
    return value if value.isascii() and value.isprintable() and value == value.strip() else quote(value)
