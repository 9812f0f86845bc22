"""
Packs the environment that executors need into one archive, which Spark takes to them.

It holds the packages that Penstock and the connectors of a pipeline need, and a `bin/python` that finds them wherever the
archive is unpacked. The interpreter itself is the machine's own, of the same version.
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import penstock
from penstock.errors import ConfigError
from penstock.pipeline import Pipeline
from penstock.pipeline.registry import BUILT_IN, Kind

OF_SPARK = frozenset({"pyspark", "py4j"})
"""Executors have them from Spark itself."""

_PYTHON = """#!/bin/sh
home=$(dirname "$(dirname "$(readlink -f "$0")")")
PYTHONPATH="$home/lib${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
exec %s "$@"
"""


def pack(output: Path, pipeline: Pipeline | None = None) -> list[str]:
    """Write the archive; gives the names and versions of what is in it. Without a pipeline: for every installed connector."""
    found = {canonicalize_name(each.name): each for each in _needed(_extras(pipeline))}
    with tarfile.open(output, "w:gz", compresslevel=1) as archive:
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        _add(archive, "bin/python", (_PYTHON % python).encode(), 0o755)
        for each in found.values():
            for inside, file in _files(each):
                archive.add(file, f"lib/{inside}", recursive=False)
        package = Path(penstock.__file__).parent
        for file in sorted(package.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.add(file, f"lib/penstock/{file.relative_to(package)}", recursive=False)
    return [f"penstock {penstock.__version__}", *(f"{name} {each.version}" for name, each in sorted(found.items()))]


def _extras(pipeline: Pipeline | None) -> set[str]:
    """The extras whose clients the tasks of a pipeline use."""
    if pipeline is None:
        return {entry.extra for entry in BUILT_IN.values() if entry.extra}
    kinds: tuple[tuple[Kind, Iterable[object]], ...] = (
        ("source", pipeline.sources.values()),
        ("sink", pipeline.sinks.values()),
    )
    names = [(kind, getattr(type(each), "name", "")) for kind, connectors in kinds for each in connectors]
    return {BUILT_IN[name].extra for name in names if name in BUILT_IN and BUILT_IN[name].extra}


def _needed(extras: set[str]) -> Iterator[Distribution]:
    """The installed packages that Penstock with these extras needs, each once."""
    seen: set[tuple[str, str]] = set()
    waiting = [("penstock", extra) for extra in ("", *sorted(extras))]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen or name in OF_SPARK:
            continue
        seen.add((name, extra))
        try:
            found = distribution(name)
        except PackageNotFoundError:
            if name == "penstock":
                raise ConfigError("penstock is not installed as a package here", code="PEN-1007") from None
            continue  # an extra that is not installed
        for text in found.requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                key = canonicalize_name(wanted.name)
                waiting += [(key, each) for each in ("", *sorted(wanted.extras))]
        if name != "penstock" and not extra:
            yield found


def _files(found: Distribution) -> Iterator[tuple[str, Path]]:
    for file in found.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            path = Path(str(file.locate()))
            if path.is_file():
                yield str(file), path


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))
