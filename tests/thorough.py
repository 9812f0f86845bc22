"""How much the tests try: a share in `make test`, all of it in `make soak NAME=tests`."""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("PENSTOCK_THOROUGH"))


def examples(count: int) -> int:
    """Examples that a property test draws."""
    return count if THOROUGH else max(25, count // 5)
