"""One JVM for all tests that need Spark: starting it takes longer than most of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def spark(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session on two threads. Tests share it: they must not stop it, nor leave views or settings behind."""
    from penstock.spark.session import start_session

    here = str(Path(__file__).parent)  # so that workers find `spark_connectors.py`
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    os.environ["PENSTOCK_TEST_ARMED"] = str(tmp_path_factory.mktemp("armed") / "failpoint")
    with pytest.MonkeyPatch.context() as patch:  # for this JVM only: executors of others may lack Penstock
        preloaded = "-Dspark.python.daemon.module=penstock.spark.daemon"
        patch.setenv("SPARK_SUBMIT_OPTS", f"{os.environ['SPARK_SUBMIT_OPTS']} {preloaded}")
        session = start_session("local[2]", "penstock-tests", tmp_path_factory.mktemp("spark") / "spark.log")
    session.conf.set("spark.sql.shuffle.partitions", "2")  # 200 tasks for a handful of rows take most of a minute
    yield session
    session.stop()
