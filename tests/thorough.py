"""How much the tests try: a share in `make test`, all of it in `make soak NAME=tests`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

THOROUGH = bool(os.environ.get("PENSTOCK_THOROUGH"))


def few(steps: Sequence[T]) -> Sequence[T]:
    """All steps at which something is killed, or every other one."""
    return steps if THOROUGH else steps[::2]


def examples(count: int) -> int:
    """Examples that a property test draws."""
    return count if THOROUGH else max(25, count // 5)
