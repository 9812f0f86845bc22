"""How formats are found, and what holds for all of them."""

from __future__ import annotations

import inspect
import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from penstock import formats
from penstock.config import Config
from penstock.errors import ConfigError
from penstock.formats import BUILT_IN, Decoded, Failures, Format, entries, load

ROOT = Path(__file__).parent.parent


def rules_of(name: str) -> set[str]:
    """The rules of a format that the code names."""
    files = Path(inspect.getfile(formats)).parent.rglob("*.py")
    return {rule for file in files for rule in re.findall(rf'"({name}\.\w+)"', file.read_text())}


class Mine(Format[Config]):
    """A stranger's."""

    name = "mine"
    options_type = Config


@pytest.fixture
def strangers(monkeypatch):
    def install(**targets: str) -> None:
        points = [EntryPoint(name, target, formats.GROUP) for name, target in targets.items()]
        monkeypatch.setattr(formats, "entry_points", lambda group: points if group == formats.GROUP else [])

    return install


class TestFinding:
    def test_an_unknown_name_is_answered_with_the_nearest(self):
        with pytest.raises(ConfigError, match=r"PEN-1006 unknown format 'jason'; did you mean 'json'\?") as caught:
            load("jason")
        assert "bytes" in caught.value.hint

    def test_an_installed_format_is_found(self, strangers):
        strangers(mine=f"{__name__}:Mine")
        assert load("mine") is Mine
        assert "mine" in [entry.name for entry in entries()]

    def test_a_built_in_name_cannot_be_taken(self, strangers):
        strangers(json=f"{__name__}:Mine")
        assert load("json") is not Mine

    @pytest.mark.parametrize("name", formats.BUILT_IN)
    def test_a_built_in_format_is_found_without_a_look_at_all_that_is_installed(self, monkeypatch, name):
        monkeypatch.setattr(
            formats, "entry_points", lambda group: pytest.fail("it reads the metadata of every package")
        )
        assert load(name).name == name

    @pytest.mark.parametrize(
        ("target", "message"),
        [("nowhere:Mine", "ModuleNotFoundError"), ("pathlib:Pat", "Pat"), ("pathlib:Path", "is no format")],
    )
    def test_what_is_no_format_is_refused(self, strangers, target, message):
        strangers(mine=target)
        with pytest.raises(ConfigError, match=f"PEN-1006 .*{message}"):
            load("mine")

    def test_a_missing_extra_says_what_to_install(self, monkeypatch):
        monkeypatch.setattr(formats, "find_spec", lambda name: None if name == "orjson" else object())
        with pytest.raises(ConfigError, match="PEN-1007 the format 'json_schema' needs the module orjson") as caught:
            load("json_schema")
        assert caught.value.hint == "pip install 'penstock[json-schema]'"

    def test_every_extra_exists(self):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert {entry.extra for entry in BUILT_IN.values() if entry.extra} <= set(extras)


@pytest.mark.parametrize("name", BUILT_IN)
class TestAll:
    def test_its_name_is_the_one_it_is_found_by(self, name):
        assert load(name).name == name
        assert (inspect.getdoc(load(name)) or "").strip()

    def test_every_option_has_a_text(self, name):
        fields = load(name).options_type.model_fields
        assert [each for each, info in fields.items() if not (info.description or "").strip()] == []

    def test_every_option_is_read(self, name):
        home = Path(inspect.getfile(load(name)))
        code = "".join(
            file.read_text() for file in ([home] if home.name != "__init__.py" else home.parent.glob("*.py"))
        )
        read = set(re.findall(r"options\.(\w+)", code))
        assert sorted(set(load(name).options_type.model_fields) - read) == []

    def test_its_page_names_every_rule(self, name):
        page = (ROOT / "docs" / "formats" / f"{name}.md").read_text()
        assert [rule for rule in rules_of(name) if f"`{rule}`" not in page] == []


def test_tombstones_stand_between_the_rows():
    rows = pa.record_batch({"x": [1, 2]})
    decoded = Decoded.of(rows, np.array([1, 4]), np.array([0, 3]), {2: ("a.b", "c")})
    assert decoded.rows.to_pylist() == [{"x": None}, {"x": 1}, {"x": None}, {"x": 2}]
    assert decoded.positions.tolist() == [0, 1, 3, 4]
    assert decoded.failures == Failures(decoded.failures.positions, ("a.b",), ("c",))
    assert decoded.failures.positions.tolist() == [2]
