"""
The oldest Spark that Penstock runs on, for tests: beside the installed one, in the user's cache.

`python -m penstock.testing.oldest_spark` installs it once (430 MB). A process uses it if its `PYTHONPATH` begins with `home()`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "4.0.0"
PY4J = "0.10.9.9"


def home() -> Path:
    """Where it is kept; `PENSTOCK_CACHE` names another directory than `~/.cache/penstock`."""
    return Path(os.environ.get("PENSTOCK_CACHE") or Path.home() / ".cache" / "penstock") / f"pyspark-{VERSION}"


def is_installed() -> bool:
    return (home() / "pyspark").is_dir()


def install() -> None:
    """Fetch and unpack it, unless it is there; a call that is broken off leaves nothing that looks installed."""
    if is_installed():
        return
    home().parent.mkdir(parents=True, exist_ok=True)
    # The constraints pin the Spark that Penstock is developed with.
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    with tempfile.TemporaryDirectory(dir=home().parent) as temporary:
        target = Path(temporary, "made")
        subprocess.run(
            [*pip, "--target", str(target), f"pyspark=={VERSION}", f"py4j=={PY4J}"], check=True, env=environment
        )
        target.rename(home())


if __name__ == "__main__":
    if "--is-installed" in sys.argv:
        sys.exit(0 if is_installed() else 1)
    install()
