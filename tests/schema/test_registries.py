"""One class of tests for every registry: the embedded one, the kit's server, a real Apicurio, and Danube's."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.formats import WireSchema
from penstock.schema import SchemaRegistryAware
from penstock.schema.compatibility import Compatibility
from penstock.schema.registry import Registry, make, registry_type
from penstock.schema.registry.confluent import Confluent, ConfluentConfig
from penstock.schema.registry.danube import DanubeRegistry, DanubeRegistryConfig
from penstock.schema.registry.embedded import Embedded, EmbeddedConfig
from penstock.schema.registry.http import Answer
from penstock.schema.registry.versions import Minimum, Pinned, choose, ensure_registered
from penstock.testing.apicurio import ApicurioServer, is_installed
from penstock.testing.danube import DanubeBroker
from penstock.testing.registry import RegistryServer

COUNT = itertools.count(1)


def avro(*fields: Any, name: str = "Order", **more: Any) -> WireSchema:
    return WireSchema("avro", json.dumps({"type": "record", "name": name, "fields": list(fields)}), **more)


ID = {"name": "id", "type": "long"}
NOTE = {"name": "note", "type": "string", "default": ""}
V1, V2, WRONG = avro(ID), avro(ID, NOTE), avro({"name": "id", "type": "string"})

JSON_1 = WireSchema("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))
PROTO_1 = WireSchema("protobuf", 'syntax = "proto3";\nmessage Order {\n  int64 id = 1;\n}\n')
PROTO_2 = WireSchema("protobuf", 'syntax = "proto3";\nmessage Order {\n  int64 id = 1;\n  string note = 2;\n}\n')
PROTO_WRONG = WireSchema("protobuf", 'syntax = "proto3";\nmessage Order {\n  string id = 1;\n}\n')


class RegistryContract:
    """What every registry does."""

    @pytest.fixture
    def registry(self) -> Registry:
        raise NotImplementedError

    @pytest.fixture
    def subject(self) -> str:
        """A name that no other test uses."""
        return f"orders/{next(COUNT)} value"

    def test_it_is_what_the_runtime_looks_for(self, registry):
        assert isinstance(registry, SchemaRegistryAware)
        assert isinstance(registry, Registry)

    def test_a_schema_comes_back_as_it_was_registered(self, registry, subject):
        made = registry.register_schema(subject, V1)
        assert (made.subject, made.version) == (subject, 1)
        assert made.id > 0
        found = registry.fetch_schema(subject)
        assert found == made
        assert found.text == V1.text
        assert registry.fetch_schema(subject, 1) == made
        assert registry.fetch_schema_by_id(made.id).text == V1.text
        assert (subject, 1) in registry.places(made.id)
        assert subject in registry.subjects()

    def test_registering_again_gives_the_same_version_also_if_only_blanks_changed(self, registry, subject):
        first = registry.register_schema(subject, V1)
        again = registry.register_schema(subject, replace(V1, text=json.dumps(json.loads(V1.text), indent=4)))
        assert (again.version, again.id) == (first.version, first.id)
        assert registry.versions(subject) == [1]

    def test_one_schema_has_one_id_in_all_subjects(self, registry, subject):
        schema = avro(ID, name=f"Named{next(COUNT)}")
        first = registry.register_schema(subject, schema)
        second = registry.register_schema(f"{subject}-copy", schema)
        assert first.id == second.id
        assert sorted(registry.places(first.id)) == [(subject, 1), (f"{subject}-copy", 1)]

    def test_versions_follow_each_other(self, registry, subject):
        ids = [registry.register_schema(subject, each).id for each in (V1, V2)]
        assert ids[0] != ids[1]
        assert registry.versions(subject) == [1, 2]
        assert registry.fetch_schema(subject).text == V2.text
        assert registry.fetch_schema(subject, 1).text == V1.text

    def test_a_schema_is_found_by_its_text(self, registry, subject):
        assert registry.find_schema(subject, V1) is None
        made = registry.register_schema(subject, V1)
        found = registry.find_schema(subject, V1)
        assert found is not None
        assert (found.version, found.id) == (made.version, made.id)
        assert registry.find_schema(subject, V2) is None

    def test_an_unknown_subject_is_a_wrong_setting(self, registry, subject):
        assert registry.versions(subject) == []
        with pytest.raises(ConfigError, match="PEN-1031"):
            registry.fetch_schema(subject)

    def test_an_unknown_version_is_answered_with_those_there_are(self, registry, subject):
        registry.register_schema(subject, V1)
        with pytest.raises(ConfigError, match="PEN-1031") as caught:
            registry.fetch_schema(subject, 9)
        assert "it has 1:" in caught.value.hint

    @pytest.mark.parametrize("id", [987654, 2**31, 2**32 - 1])
    def test_an_unknown_id_is_wrong_in_the_data(self, registry, id):
        with pytest.raises(DataError, match="PEN-3030"):
            registry.fetch_schema_by_id(id)

    def test_an_incompatible_schema_is_refused_with_its_field(self, registry, subject):
        registry.set_compatibility(subject, Compatibility.BACKWARD)
        registry.register_schema(subject, V1)
        assert registry.check_compatibility(subject, V2) == []
        (only,) = registry.check_compatibility(subject, WRONG)
        assert (only.path, only.rule) == ("Order.id", "avro.type")
        with pytest.raises(SchemaError, match="PEN-4030"):
            registry.register_schema(subject, WRONG)
        assert registry.versions(subject) == [1]

    def test_anything_may_be_the_first_version(self, registry, subject):
        assert registry.check_compatibility(subject, WRONG) == []

    def test_the_compatibility_of_a_subject_can_be_changed(self, registry, subject):
        registry.register_schema(subject, V1)
        for mode in (Compatibility.FULL_TRANSITIVE, Compatibility.FORWARD, Compatibility.NONE):
            registry.set_compatibility(subject, mode)
            assert registry.compatibility(subject) is mode
        registry.register_schema(subject, WRONG)
        assert registry.versions(subject) == [1, 2]

    def test_a_transitive_check_reaches_the_first_version(self, registry, subject):
        registry.set_compatibility(subject, Compatibility.BACKWARD)
        registry.register_schema(subject, V1)
        registry.register_schema(subject, V2)
        required = avro(ID, {"name": "note", "type": "string"})
        assert registry.check_compatibility(subject, required) == []
        registry.set_compatibility(subject, Compatibility.BACKWARD_TRANSITIVE)
        (only,) = registry.check_compatibility(subject, required)
        assert (only.path, only.rule) == ("Order.note", "avro.missing_default")

    def test_a_text_that_is_no_schema_is_refused(self, registry, subject):
        with pytest.raises(SchemaError, match="PEN-4031"):
            registry.register_schema(subject, WireSchema("avro", '{"type": "nonsense"}'))
        assert registry.versions(subject) == []

    def test_references_come_back_resolved(self, registry, subject):
        line = registry.register_schema(f"{subject}-line", avro(ID, name="Line"))
        order = avro({"name": "lines", "type": {"type": "array", "items": "Line"}}, references=(("Line", line),))
        made = registry.register_schema(subject, order)
        for found in (registry.fetch_schema(subject), registry.fetch_schema_by_id(made.id)):
            ((name, inner),) = found.references
            assert (name, inner.subject, inner.version, inner.text) == ("Line", f"{subject}-line", 1, line.text)
        again = registry.register_schema(subject, order)
        assert (again.version, again.id) == (made.version, made.id)

    def test_a_reference_to_nothing_is_refused(self, registry, subject):
        nothing = replace(V1, subject="not-there", version=1)
        with pytest.raises(SchemaError, match="PEN-4031"):
            registry.register_schema(subject, avro({"name": "x", "type": "Order"}, name="Outer",
                                                   references=(("Order", nothing),)))  # fmt: skip

    @pytest.mark.parametrize("schema", [JSON_1, PROTO_1], ids=["json_schema", "protobuf"])
    def test_other_types_come_back_as_such(self, registry, subject, schema):
        made = registry.register_schema(subject, schema)
        found = registry.fetch_schema_by_id(made.id)
        assert (found.type, found.text) == (schema.type, schema.text)

    def test_protobuf_is_checked_by_field_numbers(self, registry, subject):
        registry.set_compatibility(subject, Compatibility.BACKWARD)
        registry.register_schema(subject, PROTO_1)
        assert registry.check_compatibility(subject, PROTO_2) == []
        (only,) = registry.check_compatibility(subject, PROTO_WRONG)
        assert (only.path, only.rule) == ("Order.id", "protobuf.type")

    def test_json_schema_is_checked_by_what_it_allows(self, registry, subject):
        registry.set_compatibility(subject, Compatibility.BACKWARD)
        registry.register_schema(subject, JSON_1)
        wider, other = ({"type": "object", "properties": {"a": {"type": kind}}} for kind in ("number", "string"))
        assert registry.check_compatibility(subject, WireSchema("json_schema", json.dumps(wider))) == []
        (only,) = registry.check_compatibility(subject, WireSchema("json_schema", json.dumps(other)))
        assert (only.path, only.rule) == ("a", "json_schema.type")

    def test_it_can_be_sent_to_a_task(self, registry, subject):
        made = registry.register_schema(subject, V1)
        assert pickle.loads(pickle.dumps(registry)).fetch_schema_by_id(made.id).text == V1.text

    def test_a_version_is_chosen_by_the_strategy(self, registry, subject):
        for each in (V1, V2):
            registry.register_schema(subject, each)
        assert choose(registry, subject).version == 2
        assert choose(registry, subject, Pinned(pinned=1)).version == 1
        assert choose(registry, subject, Minimum(minimum=1)).version == 2
        with pytest.raises(ConfigError, match="PEN-1031"):
            choose(registry, subject, Minimum(minimum=3))
        with pytest.raises(ConfigError, match="PEN-1031"):
            choose(registry, subject, Pinned(pinned=3))

    def test_a_file_becomes_a_version_when_it_changed(self, registry, subject):
        one = ensure_registered(registry, subject, V1, compatibility=Compatibility.BACKWARD)
        assert ensure_registered(registry, subject, V1).version == one.version == 1
        assert ensure_registered(registry, subject, V2).version == 2
        assert ensure_registered(registry, subject, V1).version == 1
        assert registry.versions(subject) == [1, 2]

    def test_an_incompatible_file_is_refused_and_nothing_is_registered(self, registry, subject):
        ensure_registered(registry, subject, V1, compatibility=Compatibility.BACKWARD)
        with pytest.raises(SchemaError, match="PEN-4030") as caught:
            ensure_registered(registry, subject, WRONG)
        assert "Order.id" in str(caught.value)
        assert "avro.type" in str(caught.value)
        assert registry.versions(subject) == [1]

    def test_without_auto_register_a_new_file_is_refused(self, registry, subject):
        with pytest.raises(ConfigError, match="PEN-1031") as caught:
            ensure_registered(registry, subject, V1, auto_register=False)
        assert "penstock schemas register FILE" in caught.value.hint
        assert registry.versions(subject) == []
        registry.register_schema(subject, V1)
        assert ensure_registered(registry, subject, V1, auto_register=False).version == 1


class TestEmbedded(RegistryContract):
    @pytest.fixture
    def registry(self, tmp_path):
        return make("embedded", EmbeddedConfig(), tmp_path)

    def test_another_instance_sees_the_same(self, registry, subject, tmp_path):
        made = registry.register_schema(subject, V1)
        assert Embedded(EmbeddedConfig(), tmp_path).fetch_schema(subject) == made

    def test_a_copy_knows_every_id_where_the_files_are_not(self, registry, subject, tmp_path):
        made = [registry.register_schema(subject, each) for each in (V1, V2)]
        copy = pickle.dumps(Embedded(EmbeddedConfig(), tmp_path))
        registry.directory.rename(tmp_path / "elsewhere")
        assert [pickle.loads(copy).fetch_schema_by_id(each.id) for each in made] == made

    def test_a_file_may_change_the_compatibility(self, registry, subject):
        ensure_registered(registry, subject, V1)
        assert ensure_registered(registry, subject, WRONG, compatibility=Compatibility.NONE).version == 2

    @pytest.mark.parametrize("name", [".", "..", ".hidden", "a/b", "%2E", "ü n", "a.json", "content"])
    def test_any_name_may_be_a_subject(self, registry, name):
        registry.register_schema(name, V1)
        assert registry.subjects() == [name]

    def test_a_subject_needs_a_name(self, registry):
        with pytest.raises(ConfigError, match="PEN-1031"):
            registry.register_schema("", V1)


class ConfluentContract(RegistryContract):
    """What every registry with Confluent's API does."""

    @pytest.fixture
    def registry(self, server):
        return Confluent(ConfluentConfig(url=server.url, latest_cache_secs=0))

    def test_a_shared_registry_keeps_the_compatibility_that_others_rely_on(self, registry, subject):
        registry.set_compatibility(subject, Compatibility.FULL)
        registry.register_schema(subject, V1)
        with pytest.raises(ConfigError, match="PEN-1032"):
            ensure_registered(registry, subject, V2, compatibility=Compatibility.NONE)
        assert registry.compatibility(subject) is Compatibility.FULL

    def test_a_deleted_subject_is_gone_and_its_ids_are_not(self, registry, subject):
        made = registry.register_schema(subject, V1)
        registry._http.call("DELETE", f"/subjects/{subject.replace('/', '%2F').replace(' ', '%20')}")
        assert registry.versions(subject) == []
        assert subject not in registry.subjects()
        fresh = Confluent(registry.config)
        assert fresh.fetch_schema_by_id(made.id).text == V1.text

    def test_every_refusal_has_the_code_that_clients_know(self, registry, subject):
        name = subject.replace("/", "%2F").replace(" ", "%20")

        def code(method, path, body=None):
            with pytest.raises(Answer) as caught:
                registry._http.call(method, path, body)
            return caught.value.status, caught.value.code

        body = {"schema": V1.text}
        assert code("GET", f"/subjects/{name}/versions") == (404, 40401)
        assert code("GET", f"/subjects/{name}/versions/latest") == (404, 40401)
        assert code("POST", f"/subjects/{name}", body) == (404, 40401)
        assert code("DELETE", f"/subjects/{name}") == (404, 40401)
        registry.set_compatibility(subject, Compatibility.BACKWARD)
        registry.register_schema(subject, V1)
        assert code("GET", f"/subjects/{name}/versions/7") == (404, 40402)
        assert code("POST", f"/subjects/{name}", {"schema": V2.text}) == (404, 40403)
        assert code("GET", "/schemas/ids/987654") == (404, 40403)
        assert code("GET", "/schemas/ids/987654/versions") == (404, 40403)
        assert code("POST", f"/subjects/{name}/versions", {"schema": WRONG.text}) == (409, 409)
        assert code("POST", f"/subjects/{name}/versions", {"schema": '{"type": "nonsense"}'}) == (422, 42201)
        reference = {"name": "Order", "subject": subject, "version": 1}
        outer = {"schema": avro({"name": "x", "type": "Order"}, name="Outer").text, "references": [reference]}
        registry._http.call("POST", f"/subjects/{name}-outer/versions", outer)
        assert code("DELETE", f"/subjects/{name}/versions/1") == (422, 42206)
        nowhere = {**outer, "references": [{**reference, "version": 9}]}
        assert code("POST", f"/subjects/{name}-other/versions", nowhere) == (422, 42201)

    def test_a_subject_is_deleted_softly_and_then_for_good(self, registry, subject):
        name = subject.replace("/", "%2F").replace(" ", "%20")
        call = registry._http.call
        registry.register_schema(subject, V1)
        assert call("DELETE", f"/subjects/{name}") == [1]
        assert subject not in call("GET", "/subjects")
        assert subject in call("GET", "/subjects?deleted=true")
        assert call("DELETE", f"/subjects/{name}?permanent=true") == [1]
        assert subject not in call("GET", "/subjects?deleted=true")

    def test_what_is_no_registry_is_a_wrong_setting(self, server):
        wrong = Confluent(ConfluentConfig(url=server.url + "/nothing-here"))
        with pytest.raises(ConfigError, match="PEN-1032"):
            wrong.subjects()


@pytest.fixture(scope="module")
def kit():
    with RegistryServer() as running:
        yield running


@pytest.fixture(scope="module")
def apicurio(need):
    need(is_installed(), "Apicurio is not installed: python -m penstock.testing.apicurio fetches it")
    with ApicurioServer() as running:
        yield running


class TestKit(ConfluentContract):
    @pytest.fixture
    def server(self, kit):
        return kit


class TestApicurio(ConfluentContract):
    @pytest.fixture
    def server(self, apicurio):
        return apicurio


@pytest.fixture(scope="module")
def danube():
    with DanubeBroker() as running:
        yield running


class TestDanube(RegistryContract):
    """Danube numbers subjects, has no references, and compares with the last version only."""

    @pytest.fixture
    def subject(self):
        """A slash would be part of a path there, and the subject would not be listed."""
        return f"orders-{next(COUNT)} value"

    @pytest.fixture
    def registry(self, danube):
        made = DanubeRegistry(DanubeRegistryConfig(url=danube.url, latest_cache_secs=0))
        yield made
        made.close()

    def test_one_schema_has_one_id_in_all_subjects(self, registry, subject):
        """Here each subject has its own, and an id of ours names the version as well."""
        first, second = (registry.register_schema(name, V1) for name in (subject, f"{subject}-copy"))
        assert first.id != second.id
        assert registry.places(first.id) == [(subject, 1)]
        assert registry.register_schema(subject, V2).id == first.id + 1

    def test_the_compatibility_of_a_subject_can_be_changed(self, registry, subject):
        registry.register_schema(subject, V1)
        for mode in (Compatibility.FULL, Compatibility.FORWARD, Compatibility.NONE):
            registry.set_compatibility(subject, mode)
            assert registry.compatibility(subject) is mode
        registry.register_schema(subject, WRONG)
        assert registry.versions(subject) == [1, 2]

    def test_a_transitive_check_reaches_the_first_version(self, registry, subject):
        with pytest.raises(ConfigError, match="PEN-1032"):
            registry.set_compatibility(subject, Compatibility.BACKWARD_TRANSITIVE)

    def test_references_come_back_resolved(self, registry, subject):
        line = registry.register_schema(f"{subject}-line", avro(ID, name="Line"))
        with pytest.raises(SchemaError, match="PEN-4031"):
            registry.register_schema(subject, avro({"name": "x", "type": "Line"}, references=(("Line", line),)))

    def test_json_schema_is_checked_by_what_it_allows(self, registry, subject):
        """The broker refuses every other type, also one that allows more; ours finds the field where it is narrower."""
        registry.register_schema(subject, JSON_1)
        wider, other = ({"type": "object", "properties": {"a": {"type": kind}}} for kind in ("number", "string"))
        (said,) = registry.check_compatibility(subject, WireSchema("json_schema", json.dumps(wider)))
        assert said.rule == "registry"
        (only,) = registry.check_compatibility(subject, WireSchema("json_schema", json.dumps(other)))
        assert (only.path, only.rule) == ("a", "json_schema.type")

    def test_the_compatibility_of_a_new_subject_is_set_with_its_first_version(self, registry, subject):
        ensure_registered(registry, subject, V1, compatibility=Compatibility.NONE)
        assert registry.compatibility(subject) is Compatibility.NONE

    def test_a_broker_that_is_away_for_a_moment_is_asked_again(self, registry, subject, danube):
        danube.tell("fail", method="RegisterSchema", code="UNAVAILABLE", done=True)
        assert registry.register_schema(subject, V1).version == 1
        assert registry.versions(subject) == [1]


def test_an_unknown_registry_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'confluent'"):
        registry_type("conflunt")
