from __future__ import annotations

import json

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from penstock.cli.schemas import SchemaFile, make_app
from penstock.errors import DataError
from penstock.formats import WireSchema
from penstock.schema.compatibility import Compatibility
from penstock.schema.inference import infer_json_schema
from penstock.schema.registry.embedded import Embedded, EmbeddedConfig
from penstock.schema.registry.versions import Minimum, Pinned, ensure_registered
from thorough import examples

V1 = '{"type":"record","name":"Order","fields":[{"name":"id","type":"long"}]}'
V2 = '{"type":"record","name":"Order","fields":[{"name":"id","type":"long"},{"name":"n","type":"long","default":0}]}'
WRONG = V1.replace("long", "string")


@pytest.fixture
def registry(tmp_path):
    return Embedded(EmbeddedConfig(), tmp_path)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "order.avsc"


@pytest.fixture
def run(registry, file):
    """Run the command as if a pipeline file named this registry and one entry."""

    def run(*words: str, **entry: object):
        entries = [SchemaFile("orders", "avro", file, **entry)] if file.exists() else []
        app = make_app(lambda path: (registry, entries), lambda: Console(width=200))
        return CliRunner().invoke(app, ["pipeline.toml", *words])

    return run


def test_register_adds_a_version_when_the_file_changed(run, registry, file):
    file.write_text(V1)
    assert "orders: version 1, id 1" in run("register").output
    assert "orders: version 1, id 1" in run("register").output
    file.write_text(V2)
    assert "orders: version 2, id 2" in run("register", auto_register=False).output
    assert registry.versions("orders") == [1, 2]


@pytest.mark.parametrize("strategy", [None, "latest"])
def test_register_says_that_a_running_pipeline_keeps_its_versions(registry, file, strategy):
    file.write_text(V1)
    entries = [SchemaFile("orders", "avro", file, strategy=strategy)]
    for is_running in (False, True):
        app = make_app(lambda path: (registry, entries), lambda: Console(width=200), lambda path: is_running)  # noqa: B023
        said = "until it is started again" in CliRunner().invoke(app, ["pipeline.toml", "register"]).output
        assert said == (is_running and strategy is None)


def test_check_says_what_would_happen_and_registers_nothing(run, registry, file):
    file.write_text(V1)
    assert "the subject is new" in run("check").output
    assert registry.subjects() == []
    run("register")
    assert "the file is version 1, id 1" in run("check").output
    file.write_text(V2)
    assert "the file is new, and fits" in run("check").output
    assert registry.versions("orders") == [1]


def test_check_fails_with_the_field_and_the_rule(run, registry, file):
    file.write_text(V1)
    run("register")
    file.write_text(WRONG)
    for command in ("check", "register"):
        result = run(command)
        assert result.exit_code == 1
        assert "Order.id: long cannot be read as string (avro.type)" in result.output
    assert "the file is new, and fits" in run("check", compatibility=Compatibility.NONE).output
    assert registry.versions("orders") == [1]


def test_check_asks_for_what_a_run_would_need(run, registry, file):
    file.write_text(V1)
    result = run("check", auto_register=False)
    assert result.exit_code == 1
    assert "PEN-1031" in result.output


@pytest.mark.parametrize(
    ("strategy", "wrong"),
    [
        (Pinned(pinned=1), ""),
        (Pinned(pinned=2), "'orders' has no version 2, and the file becomes version 1"),
        (Minimum(minimum=2), "the file becomes version 1 of 'orders', and at least 2 is asked for"),
    ],
    ids=str,
)
def test_check_of_a_new_file_looks_at_the_version_that_is_asked_for(run, registry, file, strategy, wrong):
    file.write_text(V1)
    result = run("check", strategy=strategy)
    assert wrong in result.output
    assert result.exit_code == bool(wrong)


def test_a_file_that_cannot_be_read_is_named(run, registry, file):
    file.write_bytes(b"\xff\xfe")
    result = run("check")
    assert result.exit_code == 1
    assert "PEN-1015" in result.output
    assert str(file) in result.output


def test_an_entry_without_a_file_is_what_the_registry_has(registry):
    app = make_app(lambda path: (registry, [SchemaFile("orders", "avro")]), lambda: Console(width=200))
    result = CliRunner().invoke(app, ["pipeline.toml", "check"])
    assert (result.exit_code, "PEN-1031" in result.output) == (1, True)


def test_list_shows_the_subjects(run, file):
    assert "no subjects" in run("list").output
    file.write_text(V1)
    run("register")
    (found,) = json.loads(run("list", "--json").output)
    assert found == {"subject": "orders", "type": "avro", "version": 1, "id": 1, "compatibility": "backward"}
    assert "backward" in run("list").output


def test_show_prints_the_text_of_a_version(run, file):
    for text in (V1, V2):
        file.write_text(text)
        run("register")
    assert run("show", "orders").output == V2 + "\n"
    assert run("show", "orders", "--version", "1").output == V1 + "\n"


def test_file_and_word_come_in_any_order(registry, file):
    file.write_text(V1)
    asked = []

    def load(path):
        asked.append(path.name)
        return registry, [SchemaFile("orders", "avro", file)]

    app = make_app(load, lambda: Console(width=200))
    for words in (["register", "p.toml"], ["p.toml", "register"], ["show", "p.toml", "orders"], ["p.toml", "list"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert asked == ["p.toml"] * 4


def test_show_without_a_subject_says_what_to_name(registry):
    result = CliRunner().invoke(make_app(lambda path: (registry, []), lambda: Console()), ["show", "p.toml"])
    assert result.exit_code == 2
    assert "name the pipeline file and one SUBJECT" in result.output


def test_infer_prints_a_schema_for_samples(run, tmp_path):
    sample = tmp_path / "sample.jsonl"
    sample.write_text('{"id": 1, "tags": []}\n\n{"id": 2.5, "note": null, "tags": ["a"]}\n')
    found = json.loads(run("infer", str(sample)).output)
    assert found["properties"] == {
        "id": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"type": "null"},
    }
    assert found["required"] == ["id", "tags"]


def test_what_infer_writes_can_get_a_property(tmp_path):
    text = infer_json_schema([b'{"id": 1, "at": {"x": 1}}']).text
    registry = Embedded(EmbeddedConfig(), tmp_path)
    ensure_registered(registry, "s", WireSchema("json_schema", text), compatibility=Compatibility.BACKWARD)
    wider = json.loads(text)
    wider["properties"]["note"] = wider["properties"]["at"]["properties"]["y"] = {"type": "string"}
    found = ensure_registered(
        registry, "s", WireSchema("json_schema", json.dumps(wider)), compatibility=Compatibility.BACKWARD
    )
    assert found.version == 2


def test_samples_that_are_no_json_are_counted():
    with pytest.raises(DataError, match="sample 2 is not JSON"):
        infer_json_schema([b"{}", b"{"])
    with pytest.raises(DataError, match="no samples"):
        infer_json_schema([])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=5))
def test_an_inferred_schema_allows_every_sample(values):
    schema = infer_json_schema(json.dumps(each).encode() for each in values)
    validator = jsonschema_rs.validator_for(json.loads(schema.text))
    assert [each for each in values if not validator.is_valid(each)] == []
