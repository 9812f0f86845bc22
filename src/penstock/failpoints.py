"""
The named places where a test may kill, stop or fail the process; nothing happens, and next to nothing is spent, when off.

`PENSTOCK_FAILPOINT=stage.before=kill` arms one; `name=kill@3` waits for the third pass. Actions: `kill` (SIGKILL),
`stop` (SIGSTOP: a zombie that a test wakes later), `fail` (a retryable error) and `fatal`.
"""

from __future__ import annotations

import os
import signal

from penstock.errors import FatalError, RetryableError

NAMES: dict[str, str] = {
    "plan.before": "before the planned manifest is written",
    "plan.after": "the epoch is bound to its ranges",
    "stage.begin": "in a task, before its first row",
    "stage.middle": "in a task, after its first batch was written to a sink",
    "stage.task": "in a task, after pre_commit and before its receipt is handed over",
    "stage.after": "every task has staged, no receipt is durable",
    "prepare.after": "the receipts are durable, nothing is committed",
    "plan_apply.before": "before the work of a topic is planned",
    "plan_apply.after": "the work of every topic is planned, none of it is done",
    "apply.begin": "in a task, before its first piece of work",
    "apply.middle": "in a task, after a piece of work",
    "apply.task": "in a task, its work is done and not handed over",
    "apply.after": "all work is done, nothing is committed",
    "commit.topic": "between two topics of one sink",
    "commit.sink": "a sink has committed and its answer is lost: before the next sink or the manifest",
    "commit.before": "in a sink, at the very point where the epoch would become visible",
    "commit.after": "every sink has committed, the manifest still says prepared",
    "committed.after": "the committed manifest is durable, the sources do not know it",
    "ack.after": "the sources know it",
    "journal.data": "the journal's rows are on disk (few rows: on their way), their index record is not",
    "journal.index": "the index record is on disk, the outside system does not know it",
    "journal.told": "the outside system knows it",
}


class _Armed:
    def __init__(self, text: str) -> None:
        self.name, _, what = text.partition("=")
        self.action, _, count = what.partition("@")
        self.left = int(count or 1)
        if self.name not in NAMES:
            raise ValueError(f"unknown failpoint {self.name!r}; there are {', '.join(NAMES)}")
        if self.action not in ("kill", "stop", "fail", "fatal"):
            raise ValueError(f"unknown action {self.action!r} in PENSTOCK_FAILPOINT={text}")


_armed: _Armed | None = _Armed(os.environ["PENSTOCK_FAILPOINT"]) if os.environ.get("PENSTOCK_FAILPOINT") else None


def armed() -> str | None:
    """What is armed and has not been passed often enough, as `arm` takes it."""
    return f"{_armed.name}={_armed.action}@{_armed.left}" if _armed is not None and _armed.left > 0 else None


def arm(text: str | None) -> None:
    """Arm `name=action[@count]` in this process (and in those it forks), or disarm with None."""
    global _armed
    _armed = _Armed(text) if text else None


def hit(name: str) -> None:
    """Pass the failpoint `name`."""
    if _armed is None or _armed.name != name:
        return
    _armed.left -= 1
    if _armed.left:
        return
    if _armed.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif _armed.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif _armed.action == "fail":
        raise RetryableError(f"failpoint {name}")
    else:
        raise FatalError(f"failpoint {name}")
