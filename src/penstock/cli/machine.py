"""Looks whether this machine has what Penstock needs, and says what to do where it has not."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.text import Text

from penstock.durable import fsync
from penstock.errors import ConfigError, FatalError
from penstock.pipeline import registry
from penstock.source import Finding
from penstock.spark.java import find_java, java_problem
from penstock.spark.versions import check_spark

_LEAST_FREE_BYTES = 2_000_000_000
_LEAST_MEMORY_BYTES = 1_900_000_000
_LEAST_OPEN_FILES = 1024


def show(console: Console) -> bool:
    """Print every finding; True when all is well."""
    findings = list(examine())
    for finding in findings:
        mark = ("✓ ", "green") if finding.ok else ("✗ ", "bold red")
        console.print(Text.assemble(mark, finding.what), soft_wrap=True)
        if finding.fix:
            console.print(Text(f"    → {finding.fix}", style="" if not finding.ok else "dim"), soft_wrap=True)
    return all(finding.ok for finding in findings)


def examine(directory: Path = Path()) -> Iterator[Finding]:
    """One finding after the other; the write test is made in `directory`."""
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding(sys.version_info >= (3, 11), f"Python {python} at {sys.executable}", "")
    yield _java()
    yield _spark()
    yield _package("pyarrow", "")
    yield _package("pandas", "2.")
    yield from _extras()
    yield _memory()
    yield _open_files()
    yield _free(directory)
    temporary = Path(tempfile.gettempdir())
    if temporary.stat().st_dev != directory.stat().st_dev:
        yield _free(temporary)
    yield _durable(directory)


def _java() -> Finding:
    problem = java_problem()
    if problem:
        return Finding(False, f"{problem.code} {problem.message}", problem.hint)
    java = find_java()
    assert java is not None
    return Finding(True, f"Java {java.version} at {java.path}")


def _spark() -> Finding:
    try:
        return Finding(True, check_spark())
    except ConfigError as error:
        return Finding(False, f"{error.code} {error.message}", error.hint)


def _package(name: str, wanted: str) -> Finding:
    fix = f"pip install '{name}=={wanted}*'" if wanted else f"pip install {name}"
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(False, f"{name} is not installed", fix)
    if not found.startswith(wanted):
        return Finding(False, f"{name} is {found}, and Penstock needs {wanted}*", fix)
    return Finding(True, f"{name} {found}")


def _extras() -> Iterator[Finding]:
    there: dict[str, None] = {}
    missing: dict[str, str] = {}
    for entry in registry.entries():
        if any(importlib.util.find_spec(module) is None for module in entry.modules):
            missing[entry.name] = entry.extra
        else:
            there[entry.name] = None
    yield Finding(True, f"connectors that can be used: {', '.join(there)}")
    for name, extra in missing.items():  # an extra is a choice, so a missing one is not a fault
        yield Finding(True, f"{name}: not installed", f"pip install 'penstock[{extra}]' if you want it")


def _memory() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    what = f"{memory / 1e9:,.1f} GB of memory, {cores} {'core' if cores == 1 else 'cores'}"
    enough = memory >= _LEAST_MEMORY_BYTES
    return Finding(enough, what, "" if enough else "a run needs the JVM of Spark and Python workers: 2 GB at least")


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= _LEAST_OPEN_FILES
    fix = "" if enough else f"ulimit -n {_LEAST_OPEN_FILES}, or LimitNOFILE= in the unit of systemd"
    return Finding(enough, f"{'any number of' if soft == resource.RLIM_INFINITY else f'{soft:,}'} open files", fix)


def _free(directory: Path) -> Finding:
    free = shutil.disk_usage(directory).free
    what = f"{free / 1e9:,.1f} GB free in {directory.resolve()}"
    return Finding(free >= _LEAST_FREE_BYTES, what, "" if free >= _LEAST_FREE_BYTES else "free some space")


def _durable(directory: Path) -> Finding:
    began = time.perf_counter()
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".penstock-doctor-") as file:
            file.write(os.urandom(4096))
            file.flush()
            fsync(file.name)
    except (OSError, FatalError) as error:
        return Finding(False, f"cannot write and sync a file in {directory.resolve()}: {error}", "run it elsewhere")
    spent = time.perf_counter() - began
    return Finding(True, f"a file in {directory.resolve()} is written and synced in {spent * 1000:.1f} ms")
