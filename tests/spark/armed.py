"""
Sinks that are killed at a failpoint: the one that the file holds which `ARMED` names.

Made when they are asked for: a worker that needs one of them does not wait for the clients of all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock import failpoints
from penstock.pipeline.registry import load
from penstock.sink import SinkContext

ARMED = "PENSTOCK_TEST_ARMED"


def __getattr__(name: str) -> Any:
    if not name[:1].isupper():
        raise AttributeError(name)
    base = load("sink", name.lower())

    def open(self: Any, context: SinkContext = SinkContext()) -> None:
        file = Path(os.environ[ARMED])
        failpoints.arm(file.read_text() if file.exists() else None)
        base.open(self, context)

    # However little there is to rewrite, it is work of the second stage.
    stages = {"small_rows": 0} if hasattr(base, "small_rows") else {}
    made = type(name, (base,), {"open": open, "__module__": __name__, "name": f"armed_{name.lower()}", **stages})
    globals()[name] = made
    return made
