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

from penstock.testing import spark_classes

VERSION = "4.0.0"
PY4J = "0.10.9.9"


def home() -> Path:
    """Where it is kept; `PENSTOCK_CACHE` names another directory than `~/.cache/penstock`."""
    return Path(os.environ.get("PENSTOCK_CACHE") or Path.home() / ".cache" / "penstock") / f"pyspark-{VERSION}"


def is_installed() -> bool:
    return (home() / "pyspark").is_dir()


def environment() -> dict[str, str]:
    """What a process on it differs in from this one."""
    path = os.pathsep.join(filter(None, (str(home()), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "SPARK_SUBMIT_OPTS": spark_classes.options(home() / "pyspark")}


def install() -> None:
    """Fetch and unpack it, unless it is there; a call that is broken off leaves nothing that looks installed."""
    if not is_installed():
        _fetch()
    subprocess.run(
        [sys.executable, "-m", "penstock.testing.spark_classes"], check=True, env={**os.environ, **environment()}
    )


def _fetch() -> None:
    home().parent.mkdir(parents=True, exist_ok=True)
    # The constraints pin the Spark that Penstock is developed with.
    free = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    with tempfile.TemporaryDirectory(dir=home().parent) as temporary:
        target = Path(temporary, "made")
        subprocess.run([*pip, "--target", str(target), f"pyspark=={VERSION}", f"py4j=={PY4J}"], check=True, env=free)
        target.rename(home())


if __name__ == "__main__":
    if "--is-installed" in sys.argv:
        classes = spark_classes.archive(home() / "pyspark") if is_installed() else None
        sys.exit(0 if classes is not None and classes.exists() else 1)
    install()
