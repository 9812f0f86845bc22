"""What the hints tell people to install: `pip install 'penstock[postgres-cdc]'` must work as printed, with every pip."""

from __future__ import annotations

import re
import subprocess
import tomllib
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.metadata.spec import construct_metadata_file_2_1
from hatchling.plugin.manager import PluginManager
from packaging.requirements import Requirement

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


def _wheel(directory: Path, metadata: str) -> None:
    """A wheel without code."""
    name, number = (re.search(rf"^{field}: (.+)$", metadata, re.M)[1] for field in ("Name", "Version"))
    stem = f"{name.replace('-', '_')}-{number}"
    about = {"METADATA": metadata, "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    with zipfile.ZipFile(directory / f"{stem}-py3-none-any.whl", "w") as wheel:
        for file, text in about.items():
            wheel.writestr(f"{stem}.dist-info/{file}", text)
        wheel.writestr(f"{stem}.dist-info/RECORD", "".join(f"{stem}.dist-info/{file},,\n" for file in about))


def test_a_hint_installs_what_it_names_in_a_fresh_environment(tmp_path):
    """With the pip that comes with this Python: that of 3.11 is an old one."""
    metadata = ProjectMetadata(str(ROOT), PluginManager())
    hinted = registry.BUILT_IN["source", "postgres_cdc"].extra
    own = re.sub(r"(?m)^Requires-Dist: (?!.*extra ==).*\n", "", construct_metadata_file_2_1(metadata))
    _wheel(tmp_path, own)
    needed = {Requirement(each).name for each in metadata.core.optional_dependencies[hinted]}
    for name in needed:
        _wheel(tmp_path, f"Metadata-Version: 2.1\nName: {name}\nVersion: {version(name)}\nProvides-Extra: binary\n")
    venv.create(tmp_path / "env", with_pip=True)
    pip = [str(tmp_path / "env" / "bin" / "python"), "-m", "pip", "--isolated", "--disable-pip-version-check"]
    asked = ["install", "--no-index", f"--find-links={tmp_path}", f"penstock[{hinted}]"]
    said = subprocess.run([*pip, *asked], capture_output=True, text=True, check=True)
    assert "does not provide" not in said.stdout + said.stderr
    listed = subprocess.run([*pip, "list", "--format=freeze"], capture_output=True, text=True, check=True).stdout
    assert {"penstock", *needed} <= {line.partition("==")[0] for line in listed.splitlines()}
