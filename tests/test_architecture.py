"""The import graph: each plane imports only planes before it, and no connector imports another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

PACKAGE = Path(penstock.__file__).parent

PLANES = [
    {
        "abilities",
        "errors",
        "remedies",
        "config",
        "durable",
        "store",
        "failpoints",
        "health",
        "source",
        "requests",
        "tables",
        "capture",
        "sink",
        "changes",
        "schema",
        "formats",
    },
    {"connectors"},
    {"pipeline"},
    {"runtime"},
    {"spark", "web"},
    {"cli", "testing", "reference", "__main__"},
]

SHARED = {"http_client", "postgresql", "lake", "upsert", "messages", "sockets"}
"""Rooms under `connectors/` that several connectors share."""

ALLOWED = {("penstock.pipeline", f"penstock.{plane}") for plane in ("runtime", "spark", "web")}
"""`Pipeline.run` is a convenience that imports what runs a pipeline when it is called; nothing else steps out of its plane."""


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(("penstock", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


MODULES = modules()


def imports(path: Path, *, lazy: bool = True) -> Iterator[str]:
    """Our modules that a file imports; without `lazy` only those that it imports when it is imported itself."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if lazy else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("penstock"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else str(node.module)


def plane(module: str) -> int:
    top = module.split(".")[1]
    return next(rank for rank, plane in enumerate(PLANES) if top in plane)


def connector(module: str) -> str:
    return module.split(".")[2] if module.startswith("penstock.connectors.") else ""


def test_every_module_belongs_to_a_plane() -> None:
    known = set().union(*PLANES)
    assert sorted({name.split(".")[1] for name in MODULES if "." in name} - known) == []


@pytest.mark.parametrize("module", [name for name in sorted(MODULES) if name != "penstock"])
def test_a_module_imports_only_planes_before_its_own(module: str) -> None:
    wrong = [
        imported
        for imported in imports(MODULES[module])
        if imported != "penstock"
        and plane(imported) > plane(module)
        and (module, ".".join(imported.split(".")[:2])) not in ALLOWED
    ]
    assert wrong == []


@pytest.mark.parametrize("module", [name for name in sorted(MODULES) if connector(name)])
def test_a_connector_imports_no_other_connector(module: str) -> None:
    own = connector(module)
    others = {connector(imported) for imported in imports(MODULES[module])} - {"", own}
    if own in SHARED:
        assert others <= SHARED
    else:
        assert others <= SHARED | {WING.get(own, own)}


WING = {"postgres_capture": "postgres_cdc"}
"""A connector that is a second door to another one's rooms."""


def test_no_two_modules_import_each_other_when_they_are_imported() -> None:
    graph = {
        name: {imported for imported in imports(path, lazy=False) if imported in MODULES and imported != name}
        for name, path in MODULES.items()
    }
    done: set[str] = set()

    def walk(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " → ".join((*way[way.index(name) :], name))
        if name not in done:
            for imported in sorted(graph[name]):
                walk(imported, (*way, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_pyspark_is_imported_in_one_place() -> None:
    outside = {
        name
        for name, path in MODULES.items()
        if not name.startswith("penstock.spark")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(n.startswith("pyspark") for n in [getattr(node, "module", None) or "", *(a.name for a in node.names)])
    }
    assert outside == set()


def test_who_writes_a_sink_does_not_import_what_collapses_changes() -> None:
    found, left = set(), {"penstock.sink"}
    while left:
        name = left.pop()
        found.add(name)
        left |= {each for each in imports(MODULES[name], lazy=False) if each in MODULES} - found
    assert sorted(found & {f"penstock.changes.{name}" for name in ("collapse", "streamed", "keys", "hashing")}) == []
