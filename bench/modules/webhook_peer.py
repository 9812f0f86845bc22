"""What a webhook could be served with instead: `webhook_peer.py uvicorn|granian PORT`, one process that reads and answers."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

ANSWER = b'{"accepted": 1}'
HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]


async def bare(
    scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[..., Awaitable[None]]
) -> None:
    """Read the body and accept it, by the protocol that both servers speak."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": ANSWER})


def routed() -> Any:
    """The same with what starlette adds: a route, a request, a response."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def events(request: Request) -> Response:
        await request.body()
        return Response(ANSWER, media_type="application/json")

    return Starlette(routes=[Route("/events", events, methods=["POST"])])


def main() -> None:
    kind, port = sys.argv[1], int(sys.argv[2])
    if kind == "granian":
        from granian import Granian
        from granian.constants import Interfaces

        Granian("webhook_peer:bare", "127.0.0.1", port, interface=Interfaces.ASGINL, log_enabled=False).serve()
    else:
        import uvicorn

        uvicorn.run(routed(), port=port, log_level="error", access_log=False)


if __name__ == "__main__":
    main()
