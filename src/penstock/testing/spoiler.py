"""
A proxy before an HTTP server that spoils chosen answers, as networks and busy stores do, and counts requests.

    with Spoiler(server.port) as spoiler:
        spoiler.spoil("PUT", r"_delta_log/.*2.json", "applied, then 500")
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from dataclasses import dataclass, field
from typing import Literal, Self

Action = Literal["400", "403", "500", "503", "409", "412", "cut", "applied, then 500", "applied, then 503", "applied, then cut",
                 "applied, then 409", "applied, then 412", "without conditions"]  # fmt: skip
"""
A status: the server never sees the request; 400 says that a token has expired. `cut`: the connection ends without an answer.
`applied, then …`: the server has done it, and the answer is another one. `without conditions`: headers such as If-None-Match
do not reach the server.
"""

_REASONS = {
    "400": "ExpiredToken",
    "403": "AccessDenied",
    "409": "ConditionalRequestConflict",
    "412": "PreconditionFailed",
    "500": "InternalError",
    "503": "SlowDown",
}


@dataclass
class Rule:
    method: str
    pattern: re.Pattern[str]
    action: Action
    left: int
    struck: int = 0

    def takes(self, method: str, path: str) -> bool:
        if not self.left or method != self.method or not self.pattern.search(path):
            return False
        self.left -= 1
        self.struck += 1
        return True


@dataclass
class Spoiler:
    upstream: int
    """The port of the real server on 127.0.0.1."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of every request so far."""

    def __post_init__(self) -> None:
        self._rules: list[Rule] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="spoiler")
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def spoil(self, method: str, pattern: str, action: Action, count: int = 1) -> Rule:
        """Spoil the next `count` requests whose path and query match."""
        rule = Rule(method, re.compile(pattern), action, count)
        self._rules.append(rule)
        return rule

    def judged(self, path: str, head: str, body: bytes) -> Action | str:
        """What becomes of a request by who asks; nothing, unless a test says otherwise."""
        return ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(60)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = int(server.sockets[0].getsockname()[1])
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._one(client, answers):
                pass
        with contextlib.suppress(RuntimeError):  # the loop may have ended
            answers.close()

    async def _one(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> bool:
        head, body = await _message(client, "")
        method, path, _ = head.partition("\r\n")[0].split(" ", 2)
        self.requests.append((method, path))
        action = self.judged(path, head, body)
        action = action or next((rule.action for rule in self._rules if rule.takes(method, path)), "")
        if action == "cut":
            return False
        answer = b""
        if not action or action.startswith(("applied", "without")):
            if action == "without conditions":
                named = r"\r\n(if-(none-)?match|x-goog-if-generation-match):[^\r]*"
                head = re.sub(named, "", head, flags=re.IGNORECASE)
            answer = await self._forward(method, head, body)
        if action and not action.startswith("without"):
            status = action.rpartition(" ")[2]
            if status == "cut":
                return False
            text = "" if method == "HEAD" else f"<Error><Code>{_REASONS[status]}</Code></Error>"
            answer = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
        answers.write(answer)
        await answers.drain()
        return True

    async def _forward(self, method: str, head: str, body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        writer.write(head.encode("latin-1") + b"\r\n\r\n" + body)
        await writer.drain()
        while True:
            found, content = await _message(reader, method)
            if not found.startswith("HTTP/1.1 1"):  # "100 Continue" is followed by the answer
                break
        writer.close()
        return found.encode("latin-1") + b"\r\n\r\n" + content


async def _message(reader: asyncio.StreamReader, answers: str) -> tuple[str, bytes]:
    """A request, or the answer to a request of the method `answers`: its head, and its body as it was sent."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").removesuffix("\r\n\r\n")
    length = re.search(r"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    if answers == "HEAD" or " 204 " in head.partition("\r\n")[0] or " 304 " in head.partition("\r\n")[0]:
        return head, b""
    if re.search(r"\r\ntransfer-encoding: *chunked", head, re.IGNORECASE):
        body = b""
        while True:
            line = await reader.readuntil(b"\r\n")
            piece = await reader.readexactly(int(line.split(b";")[0], 16) + 2)
            body += line + piece
            if piece == b"\r\n":
                return head, body
    return head, await reader.readexactly(int(length[1])) if length else b""
