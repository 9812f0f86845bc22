"""What the hints tell people to install: `pip install 'penstock[postgres-cdc]'` must work as printed, with every pip."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

from penstock import formats
from penstock.pipeline import registry

ROOT = Path(__file__).parent.parent
DECLARED = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
PRINTED = {
    *(entry.extra for entry in registry.BUILT_IN.values() if entry.extra),
    *(entry.extra for entry in formats.BUILT_IN.values() if entry.extra),
    *(
        extra
        for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
        for names in re.findall(r"penstock\[([\w,-]+)\]", path.read_text())
        for extra in names.split(",")
    ),
}


@pytest.mark.parametrize("extra", sorted(PRINTED))
def test_an_extra_that_is_printed_is_declared(extra):
    assert extra in DECLARED


def test_a_build_does_not_rename_an_extra():
    """Before 23.3 pip compares the name that it is given with that in the metadata, where builds write `-` for `_`."""
    built = ProjectMetadata(str(ROOT), PluginManager()).core.optional_dependencies
    assert set(built) == DECLARED
