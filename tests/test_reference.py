from __future__ import annotations

import ast
import inspect
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import penstock
from penstock import reference
from penstock.config import Config, FilePath, Secret, type_text
from penstock.errors import CODES
from penstock.pipeline import Pipeline, registry
from penstock.pipeline.options import Processing, RouteEntry, SchemaEntry
from penstock.pipeline.registry import BUILT_IN
from penstock.remedies import REMEDIES
from penstock.schema.registry.versions import Minimum, Pinned

PACKAGE = Path(penstock.__file__).parent
DOCS = PACKAGE.parent.parent / "docs"
CONNECTORS = [pytest.param(entry, id=f"{entry.name}-{entry.kind}") for entry in BUILT_IN.values()]
SECTIONS = [Processing, RouteEntry, SchemaEntry, Pinned, Minimum]


def options(entry: registry.Entry) -> dict[str, Any]:
    return dict(registry.config_of(registry.load(entry.kind, entry.name)).model_fields)  # type: ignore[arg-type]


class TestPages:
    def test_the_pages_in_the_repository_are_fresh(self):
        assert reference.stale(DOCS) == []

    def test_checking_lists_what_is_stale_and_writing_mends_it(self, tmp_path, capsys):
        assert reference.main([str(tmp_path), "--check"]) == 1
        assert "stale: " + str(tmp_path / "errors.md") in capsys.readouterr().out
        assert reference.main([str(tmp_path)]) == 0
        assert reference.main([str(tmp_path), "--check"]) == 0
        (tmp_path / "configuration.md").write_text("by hand")
        (tmp_path / "connectors" / "gone.md").write_text("of a connector that is no more")
        assert reference.stale(tmp_path) == ["configuration.md", "connectors/gone.md"]
        assert reference.main([str(tmp_path)]) == 0
        assert reference.stale(tmp_path) == []

    def test_an_unknown_use_is_answered_with_the_right_one(self, capsys):
        assert reference.main([]) == 2
        assert "usage" in capsys.readouterr().err

    def test_every_code_has_its_row(self):
        page = reference.errors_page()
        assert [code for code in CODES if f"| {code} | " not in page] == []
        assert set(REMEDIES) == set(CODES), "and each says what to do"
        assert all(f" | {text} |" in page for text in REMEDIES.values())

    def test_every_key_of_the_file_has_its_row(self):
        page = reference.configuration_page()
        keys = [key for model in (Processing, RouteEntry, SchemaEntry) for key in reference.options_of(model)]
        assert [key for key in keys if f"| `{key}` | " not in page] == []
        assert '| `from` | text | `"#"` |' in page

    def test_a_source_and_a_sink_of_one_name_share_a_page(self):
        page = reference.connector_page("files")
        assert "## Source" in page
        assert "## Sink" in page


class TestSchema:
    def test_every_reference_leads_somewhere(self):
        schema = reference.file_schema()
        found = set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(schema)))
        assert found <= set(schema["$defs"])

    def test_the_file_has_no_keys_that_the_schema_does_not_know(self):
        from penstock.pipeline.file import _SECTIONS

        assert set(reference.file_schema()["properties"]) == set(_SECTIONS)

    @pytest.mark.parametrize("entry", CONNECTORS)
    def test_a_connector_is_described_with_its_options(self, entry):
        found = reference.file_schema()["$defs"][f"{entry.name}_{entry.kind}"]
        own = {"connector", "name", "on_error"} if entry.kind == "source" else {"connector", "name"}
        assert set(found["properties"]) == {*own, *options(entry)}
        assert found["additionalProperties"] is False


class Sample(Config):
    where: FilePath = "here"
    """Where."""
    secret: Secret | None = None
    """Secret."""


class TestTypes:
    @pytest.mark.parametrize(
        ("annotation", "text"),
        [
            (bool, "true or false"),
            (int | None, "whole number"),
            (list[str], "list of text"),
            (dict[str, int], "table of whole number"),
            (Path, "path"),
            (FilePath, "path"),
            (Secret | None, 'secret: { env = "NAME" } or { file = "path" }'),
            (Pinned, "table with `pinned`"),
        ],
    )
    def test_a_type_in_words(self, annotation, text):
        assert type_text(annotation) == text

    def test_options_in_words(self):
        rows = reference._options(Sample)
        assert rows[2] == '| `where` | path | `"here"` | Where. |'


# -- the fleet: every connector, one language --------------------------------------------------------------------------

SYNONYMS = {
    "dsn": ["connection_string", "conninfo", "connection"],
    "url": ["uri", "address", "endpoint", "urls"],
    "tables": ["relations", "table_list"],  # `table` is the template by which a sink names a topic's
    "topics": ["channels", "subjects", "queues"],  # `topic` is the template by which a sink names a message's
    "path": ["paths", "directory", "dir", "folder", "file", "location", "prefix", "root"],
    "mode": ["write_mode", "save_mode", "operation"],
    "snapshot": ["initial_snapshot", "snapshot_mode", "initial_load"],
    "heartbeat_secs": ["heartbeat", "heartbeat_ms", "heartbeat_interval_secs", "heartbeat_interval_ms"],
    "batch_rows": ["batch_size", "chunk_size", "chunk_rows", "batch_records", "fetch_size"],
}
DURATIONS = re.compile(r"interval|timeout|delay|linger|backoff|heartbeat|period|pause|wait|settle|_age|poll")
SIZES = re.compile(r"size|memory|buffer|length")


@pytest.mark.parametrize("entry", CONNECTORS)
class TestFleet:
    def test_every_option_has_a_text(self, entry):
        assert [name for name, info in options(entry).items() if not (info.description or "").strip()] == []

    def test_one_meaning_has_one_name(self, entry):
        wrong = {name: canonical for canonical, names in SYNONYMS.items() for name in names if name in options(entry)}
        assert wrong == {}

    def test_a_number_with_a_unit_carries_it_in_its_name(self, entry):
        assert unnamed_units(options(entry)) == []

    def test_names_that_the_file_itself_uses_are_left_to_it(self, entry):
        assert {"name", "connector"} & set(options(entry)) == set()

    def test_its_name_is_the_one_it_is_found_by(self, entry):
        connector = registry.load(entry.kind, entry.name)
        assert connector.name == entry.name
        assert (inspect.getdoc(connector) or "").strip()

    def test_paths_are_found_beside_the_file(self, entry):
        info = options(entry).get("path")
        if info is not None:
            assert type_text(info.annotation, info.metadata) in ("path", "list of path")

    def test_every_option_is_read(self, entry):
        connector = registry.load(entry.kind, entry.name)
        classes = (*connector.__mro__, *registry.config_of(connector).__mro__)
        planes = ("penstock.connectors.", "penstock.schema.registry.")  # a registry's client may be a connector's too
        homes = {Path(inspect.getfile(base)) for base in classes if base.__module__.startswith(planes)}
        shared = ("connectors", "registry")
        own = [path for h in homes for path in (h.parent.rglob("*.py") if h.parent.name not in shared else [h])]
        runtime = [*PACKAGE.glob("*.py"), PACKAGE / "connectors" / "upsert.py"]
        read = {name for path in [*own, *runtime] for name in names_read_from("config", path)}
        read |= {name for path in own for name in names_read_by_own_methods(path)}
        assert sorted(set(options(entry)) - read) == []


class TestSections:
    @pytest.mark.parametrize("model", SECTIONS)
    def test_every_key_has_a_text(self, model):
        assert [name for name, info in model.model_fields.items() if not (info.description or "").strip()] == []

    @pytest.mark.parametrize("model", SECTIONS)
    def test_a_number_with_a_unit_carries_it_in_its_name(self, model):
        assert unnamed_units(model.model_fields) == []

    def test_every_key_of_processing_is_read(self):
        bases = ("processing", "limits")  # `limits` is what an ingest calls it
        read = {name for path in PACKAGE.rglob("*.py") for base in bases for name in names_read_from(base, path)}
        assert sorted(set(Processing.model_fields) - read) == []

    def test_every_key_of_a_route_is_read_where_rows_travel(self):
        busy = [PACKAGE / "pipeline" / "routing.py", *PACKAGE.glob("runtime/**/*.py"), *PACKAGE.glob("spark/**/*.py")]
        read = {name for path in busy for base in ("route", "self") for name in names_read_from(base, path)}
        assert sorted(set(RouteEntry.model_fields) - read) == []

    def test_the_example_of_the_docs_is_a_pipeline(self, tmp_path):
        page = (DOCS / "coming-from.md").read_text()
        examples = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
        assert examples
        for number, example in enumerate(examples):
            assert tomllib.loads(example)
            path = tmp_path / f"{number}.toml"
            path.write_text(example)
            Pipeline.from_toml(path)


def unnamed_units(fields: Any) -> list[str]:
    def wrong(name: str) -> bool:
        if DURATIONS.search(name):
            return not name.endswith(("_ms", "_secs"))
        return bool(SIZES.search(name)) and not name.endswith(("_bytes", "_rows"))

    numbers = [name for name, info in fields.items() if is_number(info.annotation)]
    return [name for name in numbers if wrong(name)]


def is_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(is_number(each) for each in get_args(annotation))


def names_read_from(base: str, path: Path) -> set[str]:
    """Every x of `base.x`, `….base.x`, `…._base.x`, and of `b.x` where `b = ….base`, in a file."""
    nodes = nodes_of(path)
    assigned = [(node.targets[0], node.value) for node in nodes if isinstance(node, ast.Assign)]
    owners = {base, f"_{base}", *(last_name(target) for target, value in assigned if last_name(value) == base)}
    loads = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
    return {node.attr for node in loads if last_name(node.value) in owners}


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def last_name(node: ast.AST) -> str:
    return getattr(node, "id", None) or getattr(node, "attr", None) or ""


def names_read_by_own_methods(path: Path) -> Iterator[str]:
    """Every x of `self.x` in methods of config classes, but for validators: to check an option is not to use it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config"):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and not any(
                "validator" in ast.dump(d) for d in method.decorator_list
            ):
                for each in ast.walk(method):
                    if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
                        yield each.attr


class TestTheFleetTestsThemselves:
    def test_an_option_that_is_only_declared_is_not_read(self, tmp_path):
        source = tmp_path / "source.py"
        source.write_text(
            "class XConfig(Config):\n    used: int\n    kept: int\n    lost: int\n"
            "    @model_validator(mode='after')\n    def check(self): return self.lost\n"
            "    def name(self): return self.kept\n"
            "class X:\n    def open(self): return self.config.used\n"
            "    def read(self):\n        c = self.config\n        return c.short\n"
        )
        assert {*names_read_from("config", source), *names_read_by_own_methods(source)} == {"used", "kept", "short"}

    def test_units_are_asked_for_where_they_matter(self):
        class Wrong(BaseModel):
            timeout: int = 1
            retry_delay: float | None = None
            buffer_size: int = 1
            linger_ms: int = 1
            chunk_bytes: int = 1
            wait: bool = True
            rows: int = 1

        assert unnamed_units(Wrong.model_fields) == ["timeout", "retry_delay", "buffer_size"]
