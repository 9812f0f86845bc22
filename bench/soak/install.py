"""
The install hints with an old pip, in a fresh environment: every extra is found by the name that is printed.

The project that is installed has our build and the names of our extras, and a small package in each: the question is
whether pip finds the extra, not whether it can fetch Spark.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PIP = "23.0.1"  # newer ones write `-` for `_` on both sides before they compare
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "penstock"
version = "0"
[project.optional-dependencies]
"""


def main() -> int:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        project = Path(directory, "project")
        (project / "penstock").mkdir(parents=True)
        (project / "penstock" / "__init__.py").touch()
        (project / "pyproject.toml").write_text(PROJECT + "".join(f'{name} = ["iniconfig"]\n' for name in extras))
        subprocess.run([sys.executable, "-m", "venv", f"{directory}/venv"], check=True)
        pip = [f"{directory}/venv/bin/python", "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", f"pip=={PIP}"], check=True)
        for extra in extras:
            command = [*pip, "install", "--dry-run", f"{project}[{extra}]"]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found = "Would install iniconfig" in said
            print(f"{extra:18} {'found' if found else 'NOT FOUND'}", flush=True)
            wrong += not found
    return wrong


if __name__ == "__main__":
    sys.exit(main())
