"""What is marked `every_spark` also runs on the oldest Spark that is supported; a version that does not serve is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.spark import versions
from penstock.testing import oldest_spark

ROOT = Path(__file__).resolve().parent.parent.parent


def on_oldest() -> dict[str, str]:
    """The environment of a process that runs on the oldest Spark."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    return {**own, **oldest_spark.environment()}


@pytest.fixture(scope="module")
def oldest(java: None, need: Callable[[bool, str], None]) -> None:
    need(oldest_spark.is_installed(), "the oldest Spark is missing: python -m penstock.testing.oldest_spark")


@pytest.mark.timeout(900)
def test_the_engine_and_the_data_source_work_on_the_oldest_spark(oldest: None) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "every_spark", "tests/spark"]
    done = subprocess.run(command, cwd=ROOT, env=on_oldest(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 8
    assert "skipped" not in done.stdout


def test_check_says_what_an_old_version_lacks(oldest: None, tmp_path: Path) -> None:
    asked = "from penstock.spark.versions import check_spark; print(check_spark())"
    said = subprocess.run([sys.executable, "-c", asked], env=on_oldest(), capture_output=True, text=True, check=True)
    assert said.stdout.startswith(f"pyspark {oldest_spark.VERSION}, which lacks limits, availableNow and lag")


@pytest.mark.parametrize("found", ["3.5.9", "5.0.0"])
def test_a_version_that_does_not_serve_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(versions, "version", lambda _: found)
    with pytest.raises(ConfigError, match=f"PEN-1050 pyspark is {found}, and Penstock runs on Spark 4"):
        versions.check_spark()
