"""`penstock console`: the page of all pipelines of a machine, until it is stopped."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

from penstock.config import Secret
from penstock.errors import ConfigError
from penstock.runtime.waker import PIECE_SECS
from penstock.web import serve_all


def serve(directories: list[Path], host: str, port: int, token_env: str | None) -> None:
    """Serve until SIGINT or SIGTERM."""
    missing = [str(each) for each in directories if not each.is_dir()]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is no directory", hint="name directories that hold state directories")
    stop = threading.Event()

    def end(*_: Any) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    with serve_all(directories, host, port, Secret(env=token_env) if token_env else None) as server:
        can = "actions need the token" if token_env else "it only shows; --token-env NAME allows actions"
        print(f"console on {server.url} ({can})", flush=True)
        while not stop.wait(PIECE_SECS):
            pass  # in pieces: see `Waker.wait`
