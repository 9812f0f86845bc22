from __future__ import annotations

import importlib.util
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from penstock.config import Config
from penstock.connectors.console import Console
from penstock.connectors.generator import Generator
from penstock.errors import ConfigError
from penstock.pipeline import registry
from penstock.sink import SinkConnector
from penstock.source import SourceConnector


class ThirdSource(SourceConnector[Config]):
    name = "third"


class ThirdSink(SinkConnector):  # type: ignore[type-arg]
    name = "third"


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A pipeline file's directory; what is imported from it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def entry_points(monkeypatch, **targets: str) -> None:
    points = [EntryPoint(name.replace("__", "."), target, registry.GROUP) for name, target in targets.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: [p for p in points if p.group == group])


class TestBuiltIn:
    def test_a_built_in_connector_is_found_by_kind_and_name(self):
        assert registry.load("source", "generator") is Generator
        assert registry.load("sink", "console") is Console
        assert registry.source_type("generator") is Generator

    def test_listing_imports_nothing(self, monkeypatch):
        monkeypatch.setattr(registry, "_import", lambda *_: pytest.fail("imported"))
        assert {(entry.kind, entry.name) for entry in registry.entries()} >= {
            ("source", "generator"), ("source", "files"), ("sink", "console"), ("sink", "files"), ("sink", "delta"),
        }  # fmt: skip

    def test_an_unknown_name_is_answered_with_the_nearest_and_the_list(self):
        with pytest.raises(
            ConfigError, match="PEN-1006 unknown sink connector 'detla'; did you mean 'delta'"
        ) as caught:
            registry.load("sink", "detla")
        assert "delta, files" in caught.value.hint

    def test_a_sink_asked_for_as_a_source_is_told_so(self):
        with pytest.raises(ConfigError, match="PEN-1006 'console' is a sink, not a source"):
            registry.load("source", "console")

    def test_a_missing_extra_says_what_to_install(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"PEN-1007 .*deltalake") as caught:
            registry.load("sink", "delta")
        assert caught.value.hint == "pip install 'penstock[delta]'"

    def test_a_module_that_misses_an_import_of_its_extra_says_what_to_install(self, monkeypatch, base):
        (base / "needy.py").write_text("import not_there_at_all\n")
        sys.path.insert(0, str(base))
        entry = registry.Entry("sink", "needy", "needy:Needy", extra="needy")
        monkeypatch.setitem(registry.BUILT_IN, ("sink", "needy"), entry)
        with pytest.raises(ConfigError, match=r"PEN-1007 .*not_there_at_all") as caught:
            registry.load("sink", "needy")
        assert caught.value.hint == "pip install 'penstock[needy]'"

    def test_a_connector_without_options_takes_none(self):
        assert registry.config_of(ThirdSink) is Config


class TestEntryPoints:
    def test_its_kind_is_known_by_its_class(self, monkeypatch):
        entry_points(monkeypatch, third=f"{__name__}:ThirdSource")
        assert registry.load("source", "third") is ThirdSource
        with pytest.raises(ConfigError, match="PEN-1006 'third' is a source, not a sink"):
            registry.load("sink", "third")

    def test_a_source_and_a_sink_may_share_a_name(self, monkeypatch):
        entry_points(monkeypatch, third__source=f"{__name__}:ThirdSource", third__sink=f"{__name__}:ThirdSink")
        assert registry.load("source", "third") is ThirdSource
        assert registry.load("sink", "third") is ThirdSink

    def test_it_is_among_the_names_that_are_offered(self, monkeypatch):
        entry_points(monkeypatch, third=f"{__name__}:ThirdSource")
        with pytest.raises(ConfigError, match="did you mean 'third'"):
            registry.load("source", "thrid")

    def test_a_built_in_name_cannot_be_taken_over(self, monkeypatch):
        entry_points(monkeypatch, generator=f"{__name__}:ThirdSource")
        assert registry.load("source", "generator") is Generator

    def test_what_it_lacks_is_named(self, monkeypatch):
        entry_points(monkeypatch, third="not_there_at_all:Third")
        with pytest.raises(ConfigError, match=r"PEN-1007 .*not_there_at_all"):
            registry.load("source", "third")


SOURCE = "from penstock.source import SourceConnector\nclass Mine(SourceConnector): name = 'mine'\n"


class TestModules:
    def test_a_class_beside_the_file_is_found(self, base):
        (base / "beside.py").write_text(SOURCE)
        assert registry.load("source", "beside:Mine", base).name == "mine"

    def test_a_class_in_a_package_beside_the_file_is_found(self, base):
        (base / "pack").mkdir()
        (base / "pack" / "__init__.py").write_text("")
        (base / "pack" / "inner.py").write_text(SOURCE)
        found = registry.load("source", "pack.inner:Mine", base)
        assert registry.third_party_modules([found], base) == [base / "pack"]

    def test_a_module_that_is_not_there_says_where_to_put_it(self, base):
        with pytest.raises(
            ConfigError, match=r"PEN-1006 cannot import 'nowhere.x:Mine': there is no such module"
        ) as caught:
            registry.load("source", "nowhere.x:Mine", base)
        assert "nowhere.py beside the pipeline file" in caught.value.hint

    def test_a_module_that_fails_says_how(self, base):
        (base / "failing.py").write_text("1 / 0\n")
        with pytest.raises(ConfigError, match="PEN-1006 cannot import 'failing:Mine': ZeroDivisionError"):
            registry.load("source", "failing:Mine", base)

    def test_a_syntax_error_says_so(self, base):
        (base / "broken.py").write_text("def\n")
        with pytest.raises(ConfigError, match="PEN-1006 cannot import 'broken:Mine': SyntaxError"):
            registry.load("source", "broken:Mine", base)

    def test_a_class_that_is_not_there_is_answered_with_the_nearest(self, base):
        (base / "near.py").write_text(SOURCE)
        with pytest.raises(ConfigError, match=r"PEN-1006 module near .* has no 'Mime'") as caught:
            registry.load("source", "near:Mime", base)
        assert "'Mine'" in caught.value.hint

    @pytest.mark.parametrize("spec", ["a b:C", "mod:", ":C", "mod:a-b"])
    def test_what_names_no_object_is_refused(self, base, spec):
        with pytest.raises(ConfigError, match=r"PEN-1006 .*package.module:name"):
            registry.load("source", spec, base)

    def test_a_class_that_is_no_connector_is_refused(self, base):
        with pytest.raises(ConfigError, match="PEN-1006 'pathlib:Path' is not a connector class"):
            registry.load("source", "pathlib:Path", base)

    def test_a_module_of_the_same_name_from_elsewhere_is_not_mistaken_for_it(self, base):
        other = types.ModuleType("twice")
        other.__file__ = "/elsewhere/twice.py"
        sys.modules["twice"] = other
        (base / "twice.py").write_text(SOURCE)
        with pytest.raises(ConfigError, match=r"PEN-1006 .*/elsewhere/twice.py was imported before"):
            registry.load("source", "twice:Mine", base)


class TestShipping:
    def test_helpers_beside_a_connector_travel_with_it(self, base):
        (base / "helper_of_mine.py").write_text("")
        (base / "with_helper.py").write_text("import helper_of_mine\n" + SOURCE)
        found = registry.load("source", "with_helper:Mine", base)
        assert registry.third_party_modules([found], base) == [base / "helper_of_mine.py", base / "with_helper.py"]

    def test_an_installed_connector_travels_as_its_package(self):
        assert registry.third_party_modules([ThirdSource]) == [Path(__file__)]

    def test_penstock_and_its_own_connectors_are_not_among_them(self, base):
        assert registry.third_party_modules([Generator, Console, len], base) == []
