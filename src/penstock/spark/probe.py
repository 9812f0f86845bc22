"""
A first job on a cluster: does every executor have what the pipeline needs there?

Its tasks import nothing of Penstock before they have looked whether that is possible. Each problem is one line, with what
to do; all of them are said together.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel

from penstock.config import Secret
from penstock.errors import ConfigError
from penstock.pipeline import Pipeline
from penstock.pipeline.registry import BUILT_IN, Kind
from penstock.source import Connector

MODULES = ("pyarrow", "pydantic", "pandas")
"""What every task needs besides Penstock, which travels."""

WARN_SECS = 15.0

_log = logging.getLogger("penstock.message")


@dataclass(frozen=True)
class Needs:
    """What a pipeline needs in its tasks; picklable."""

    modules: tuple[tuple[str, str], ...] = tuple((module, "") for module in MODULES)
    """Each with the connector that it is a client of."""
    variables: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """Files that hold secrets."""
    directories: tuple[tuple[str, str], ...] = ()
    """Local directories that every machine must see, each with whose it is."""

    @classmethod
    def of(cls, pipeline: Pipeline) -> Needs:
        connectors: list[tuple[Kind, str, Connector[Any]]] = [
            *(("source", name, each) for name, each in pipeline.sources.items()),
            *(("sink", name, each) for name, each in pipeline.sinks.items()),
        ]
        modules = dict.fromkeys(MODULES, "")
        secrets: list[Secret] = []
        directories: dict[str, str] = {}
        for kind, name, each in connectors:
            entry = BUILT_IN.get((kind, getattr(type(each), "name", "")))
            modules |= {module: type(each).name for module in (entry.modules if entry else ())}
            secrets += secrets_of(each.config)
            if (root := _root(each)) is not None:
                directories[str(root)] = f"{kind} {name!r}"
        if any(route.streaming for route in pipeline.router.effective):  # its tasks keep their state there
            directories[str(_made(pipeline.processing.state_dir))] = "the state of streaming routes"
        return cls(
            tuple(modules.items()),
            tuple(sorted({secret.env for secret in secrets if secret.env})),
            tuple(sorted({str(secret.file) for secret in secrets if secret.file})),
            tuple(directories.items()),
        )


def secrets_of(value: Any) -> Iterator[Secret]:
    """Every secret that a configuration refers to."""
    if isinstance(value, Secret):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from secrets_of(getattr(value, name))
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from secrets_of(each)


def _root(connector: Connector[Any]) -> Path | None:
    """The local directory that a connector's tasks read or write, down to the first part that is a pattern."""
    path = getattr(connector.config, "path", None)
    if not isinstance(path, str | Path) or "://" in str(path).removeprefix("file://"):
        return None
    fixed = re.split(r"[*?\[{]", str(path).removeprefix("file://"), maxsplit=1)[0]
    return _made(Path(fixed if fixed == str(path) else fixed.rpartition("/")[0] or "/"))


def _made(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    whole = Path(os.path.abspath(path))
    return next(each for each in (whole, *whole.parents) if each.is_dir())


def probe(context: Any, needs: Needs, tasks: int) -> None:
    """Run the job; refuses to go on with what the executors lack, or with why no task could run."""
    found: dict[str, str] = {}
    with _nonces(needs) as nonces, _said_if_it_waits():
        try:
            answers = context.parallelize(range(tasks), tasks).mapPartitionsWithIndex(_looker(needs, nonces)).collect()
        except Exception as error:  # the reason is one of a few, and none of them is a class of its own
            raise _refusal([_why(str(error))]) from error
    for host, problems in answers:
        for what, fix in problems:
            found.setdefault(f"{what} → {fix}", host)
    if found:
        raise _refusal([f"executors on {host}: {line}" for line, host in found.items()])


def _refusal(lines: Sequence[str]) -> ConfigError:
    first, *others = lines
    hint = "see docs/spark.md, On a cluster"
    return ConfigError("\n".join([first, *others]), code="PEN-1051", hint=hint)


@contextlib.contextmanager
def _nonces(needs: Needs) -> Iterator[dict[str, tuple[str, str]]]:
    """A file with a number of its own in each directory: who cannot read the number does not see the directory."""
    made: dict[str, tuple[str, str]] = {}
    try:
        for directory, whose in needs.directories:
            nonce = uuid4().hex
            file = Path(directory, f".penstock-probe-{nonce[:8]}")
            with contextlib.suppress(OSError):  # a directory that is only read: then its tasks say what is wrong
                file.write_text(nonce)
                made[str(file)] = (nonce, whose)
        yield made
    finally:
        for name in made:
            Path(name).unlink(missing_ok=True)


@contextlib.contextmanager
def _said_if_it_waits() -> Iterator[None]:
    done = threading.Event()

    def wait() -> None:
        waited = 0.0
        while not done.wait(WARN_SECS):
            waited += WARN_SECS
            _log.warning(
                "no executor has run a task for %.0f s: is the cluster full, or can its machines not reach this driver? "
                "(spark.driver.host, spark.executor.memory and spark.cores.max decide it)",
                waited,
            )

    thread = threading.Thread(target=wait, name="penstock-probe", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _looker(needs: Needs, nonces: dict[str, tuple[str, str]]) -> Callable[[int, Iterable[int]], Iterator[Any]]:
    modules, variables, files = needs.modules, needs.variables, needs.files

    def look(index: int, nothing: Iterable[int]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        # Pickled by value: nothing of Penstock may be needed to run it.
        import importlib.util
        import os
        import socket
        import sys

        list(nothing)
        problems = []
        for module, client_of in modules:
            if importlib.util.find_spec(module) is None:
                who = f" (for {client_of})" if client_of else ""
                fix = "install it there, or let the environment travel: penstock pack"
                problems.append((f"{sys.executable} has no module {module}{who}", fix))
        for name in variables:
            if name not in os.environ:
                fix = f"set spark.executorEnv.{name}, or in the environment of the machines; or use a file that all can read"
                problems.append((f"the environment variable {name} of a secret is not set there", fix))
        for name in files:
            if not os.access(name, os.R_OK):
                problems.append((f"the secret file {name} cannot be read there", "put it on every machine"))
        for file, (nonce, whose) in nonces.items():
            try:
                with open(file) as opened:
                    same = opened.read() == nonce
            except OSError:
                same = False
            if not same:
                fix = "use storage that every machine has under this path, or an object store"
                problems.append((f"{os.path.dirname(file)} of {whose} is not the driver's directory there", fix))
        yield socket.gethostname(), problems

    return look


_WHY = (
    (
        r"PYTHON_VERSION_MISMATCH.*?([0-9]\.[0-9]+).*?([0-9]\.[0-9]+)",
        "the executors run Python {0}, and this driver runs {1} → name another with PYSPARK_PYTHON, or: penstock pack",
    ),
    (
        r'Cannot run program "([^"]+)"',
        "there is no {0} on an executor → name its Python with PYSPARK_PYTHON, or: penstock pack",
    ),
    (r"No module named '([^']+)'", "an executor's Python has no module {0} → install it there, or: penstock pack"),
)


def _why(text: str) -> str:
    """Why not even the first task ran, in one line."""
    for pattern, line in _WHY:
        if found := re.search(pattern, text, re.DOTALL):
            return line.format(*found.groups())
    from penstock.spark.failures import last_line

    return f"no task could run: {last_line(text)} → Spark's log says more"
