"""The page about registries says what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import penstock
from penstock.errors import CODES
from penstock.schema.compatibility import Compatibility
from penstock.schema.registry import BUILT_IN, registry_type

PACKAGE = Path(penstock.__file__).parent
PAGE = (PACKAGE.parent.parent / "docs" / "registries.md").read_text()


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_option_has_a_text_is_on_the_page_and_is_read(name):
    fields = registry_type(name).config_type.model_fields
    source = "".join(path.read_text() for path in (PACKAGE / "schema" / "registry").glob("*.py"))
    assert [key for key, info in fields.items() if not info.description] == []
    assert [key for key in fields if f"`{key}`" not in PAGE] == []
    assert [key for key in fields if f"config.{key}" not in source] == []


def test_the_examples_are_registries():
    examples = [tomllib.loads(text)["registry"] for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)]
    assert {each["type"] for each in examples} == set(BUILT_IN)
    for each in examples:
        registry_type(each.pop("type")).config_type.model_validate(each)


def test_every_mode_and_every_rule_is_on_the_page():
    modules = (PACKAGE / "schema" / "compatibility").glob("*.py")
    rules = {
        rule for path in modules for rule in re.findall(r'"((?:avro|protobuf|json_schema)\.[a-z_]+)"', path.read_text())
    }
    by_keyword = {"json_schema.unique_items", "json_schema.multiple_of", "json_schema.false"}
    assert len(rules) > 25
    assert sorted(rule for rule in rules - by_keyword if f"`{rule}`" not in PAGE) == []
    assert [mode for mode in Compatibility if f"`{mode.removesuffix('_transitive')}`" not in PAGE] == []


def test_every_code_on_the_page_exists():
    assert set(re.findall(r"PEN-\d{4}", PAGE)) <= set(CODES)
    assert {code for code in CODES if "registry" in CODES[code]} <= set(re.findall(r"PEN-\d{4}", PAGE))
