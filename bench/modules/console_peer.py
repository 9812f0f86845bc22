"""What the console could be served with instead: starlette on uvicorn, in the environment that the bench makes for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

STATUS = Path(sys.argv[2])


def status(request: Request) -> Response:
    """The same work as ours does: read the status of a stopped pipeline, and send it."""
    found = json.loads(STATUS.read_text())
    return Response(json.dumps(found, ensure_ascii=False), media_type="application/json")


uvicorn.run(Starlette(routes=[Route("/status", status)]), port=int(sys.argv[1]), log_level="error", access_log=False)
