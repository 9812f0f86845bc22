"""
Packs the environment that executors need into one archive, which Spark takes to them.

It holds the packages that Penstock and the connectors of a pipeline need, and a `bin/python` that finds them wherever the
archive is unpacked. The interpreter itself is the machine's own, of the same version.
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
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


def pack(output: Path, pipeline: Pipeline | None = None, more: Sequence[str] = ()) -> list[str]:
    """
    Write the archive; gives the names and versions of what is in it. Without a pipeline: for every installed connector.

    `more` are installed packages that modules of the user's own need.
    """
    wanted = [("penstock", extra) for extra in ("", *sorted(_extras(pipeline)))]
    wanted += [(name, "") for name in (*_of_others(pipeline), *map(_installed, more))]
    found = {canonicalize_name(each.name): each for each in _needed(wanted)}
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


def _of_others(pipeline: Pipeline | None) -> set[str]:
    """The installed packages that connectors of others come from; a module beside the file is none, and travels by itself."""
    connectors = [] if pipeline is None else [*pipeline.sources.values(), *pipeline.sinks.values()]
    modules = {type(each).__module__.partition(".")[0] for each in connectors} - {"penstock"}
    known = packages_distributions() if modules else {}
    return {name for module in modules for name in known.get(module, ())}


def _installed(name: str) -> str:
    try:
        return distribution(name).name
    except PackageNotFoundError:
        raise ConfigError(
            f"the package {name} is not installed here, so it cannot be packed",
            code="PEN-1007",
            hint=f"pip install {name}; the name is that of the package, which may differ from what is imported",
        ) from None


def _needed(wanted: Sequence[tuple[str, str]]) -> Iterator[Distribution]:
    """These installed packages, each with an extra, and all that they need, each once; Penstock itself is packed apart."""
    seen: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(name), extra) for name, extra in wanted]
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
            required = Requirement(text)
            if required.marker is None or required.marker.evaluate({"extra": extra}):
                key = canonicalize_name(required.name)
                waiting += [(key, each) for each in ("", *sorted(required.extras))]
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
