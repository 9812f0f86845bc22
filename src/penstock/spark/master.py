"""Which Spark masters there are: a wrong one is refused before anything starts."""

from __future__ import annotations

import re

from penstock.errors import ConfigError

_MASTER = re.compile(
    r"local|local\[(\*|\d+)(\s*,\s*\d+)?\]|local-cluster\[[^\]]+\]|yarn|spark://[^\s:]+:\d+(,[^\s:,]+:\d+)*|k8s://\S+"
)


def check_master(master: str | None) -> str:
    """What is said of the master that a run would use; refuses one that Spark cannot know."""
    if master is None:
        return ""
    if not _MASTER.fullmatch(master):
        raise ConfigError(
            f"--master is {master!r}, which is no Spark master",
            code="PEN-1003",
            hint="local[4], local[*], spark://HOST:7077, yarn or k8s://HOST:PORT",
        )
    return f"Spark master {master}"
