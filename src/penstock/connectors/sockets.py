"""What sources that listen share."""

from __future__ import annotations

import contextlib
import resource

OTHER_FILES = 1024
"""What a process has open beside its connections."""


def allow_connections(count: int) -> None:
    """Raise this process's own limit of open files for so many connections, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
