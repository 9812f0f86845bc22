"""
A reader of lake tables that shares no code with us: DuckDB with its extensions, in an environment of its own.

The newest DuckDB has no extensions on the package index, so that an older one reads. `python -m penstock.testing.readers`
installs it once into the user's cache (150 MB).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

VERSION = "1.5.5"
EXTENSIONS = ("delta", "iceberg", "avro", "httpfs")

_SERVER = """
import json, os, sys
import duckdb
from duckdb_extensions import import_extension
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # the progress bar of a slow query is no answer
for name in sys.argv[1:]:
    import_extension(name)
connection = duckdb.connect()
for name in sys.argv[1:]:
    connection.execute(f"load {name}")
for line in sys.stdin:
    try:
        found = connection.cursor().execute(json.loads(line))
        names = [each[0] for each in found.description]
        answer = {"rows": [dict(zip(names, row)) for row in found.fetchall()]}
    except Exception as error:
        answer = {"error": str(error)}
    print(json.dumps(answer, default=str), file=answers, flush=True)
"""


def home() -> Path:
    """Where it is kept; `PENSTOCK_CACHE` names another directory than `~/.cache/penstock`."""
    return Path(os.environ.get("PENSTOCK_CACHE") or Path.home() / ".cache" / "penstock") / f"duckdb-{VERSION}"


def is_installed() -> bool:
    return _installed() == " ".join(EXTENSIONS)


def _installed() -> str:
    """The extensions that are there."""
    return (home() / "installed").read_text() if (home() / "installed").exists() else ""


def install() -> None:
    """Make the environment, unless it is there."""
    if is_installed():
        return
    wanted = [f"duckdb=={VERSION}", f"duckdb-extensions=={VERSION}"]
    wanted += [f"duckdb-extension-{name}=={VERSION}" for name in EXTENSIONS]
    without_ours = {name: value for name, value in os.environ.items() if "CONSTRAINT" not in name}
    if not (home() / "installed").exists():
        shutil.rmtree(home(), ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(home())], check=True)
    pip = [str(home() / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *wanted], check=True, env=without_ours)
    (home() / "installed").write_text(" ".join(EXTENSIONS))


class DuckDB:
    """A process that answers queries, one at a time."""

    def __enter__(self) -> DuckDB:
        self._process = subprocess.Popen(
            [str(home() / "bin" / "python"), "-c", _SERVER, *EXTENSIONS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def rows(self, query: str) -> list[dict[str, Any]]:
        """The rows of a query; values that JSON lacks come as texts."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(query)}\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return list(answer["rows"])


if __name__ == "__main__":
    if "--is-installed" in sys.argv:
        sys.exit(not is_installed())
    install()
