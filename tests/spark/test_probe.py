"""What executors lack is said in a line each, and who waits for executors says so."""

from __future__ import annotations

import logging
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.pipeline import Pipeline
from penstock.spark import SparkEngine
from penstock.spark import probe as probing
from penstock.spark.pack import pack
from penstock.spark.probe import Needs, probe
from penstock.spark.session import expected_cores


class Executors:
    """A context whose tasks run here."""

    def __init__(self, fails: str = "") -> None:
        self._fails = fails

    def parallelize(self, numbers: Any, tasks: int) -> Executors:
        return self

    def mapPartitionsWithIndex(self, look: Any) -> Executors:
        self._look = look
        return self

    def collect(self) -> list[Any]:
        if self._fails:
            raise RuntimeError(self._fails)
        return list(self._look(0, iter(())))


def refused(needs: Needs, fails: str = "") -> str:
    with pytest.raises(ConfigError, match="PEN-1051") as error:
        probe(Executors(fails), needs, 2)
    return error.value.message


@pytest.mark.parametrize(
    ("needs", "says"),
    [
        (Needs((("no_such_module", "delta"),)), r"has no module no_such_module \(for delta\) → .*penstock pack"),
        (
            Needs(variables=("NOT_THERE",)),
            "variable NOT_THERE of a secret is not set there → set spark.executorEnv.NOT_THERE",
        ),
        (Needs(files=("/run/no/secret",)), "secret file /run/no/secret cannot be read there → put it on every machine"),
    ],
    ids=["module", "variable", "file"],
)
def test_what_is_missing_is_a_line_with_what_to_do(needs: Needs, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        probe(Executors(), needs, 2)


def test_a_directory_of_another_machine_is_known_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = Needs(modules=(), directories=((str(tmp_path), "sink 'lake'"),))
    probe(Executors(), needs, 2)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    looker = probing._looker

    def elsewhere(needs: Needs, nonces: dict[str, tuple[str, str]]) -> Any:
        return looker(needs, {file: ("another", whose) for file, (_, whose) in nonces.items()})

    monkeypatch.setattr(probing, "_looker", elsewhere)
    assert f"{tmp_path} of sink 'lake' is not the driver's directory there" in refused(needs)


def test_every_trouble_is_said_at_once() -> None:
    said = refused(Needs((("no_such_module", ""),), ("NOT_THERE",), ("/run/no/secret",))).splitlines()
    assert len(said) == 3
    assert all(line.startswith("executors on ") for line in said)


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9 than that in driver: 3.11",
            "the executors run Python 3.9, and this driver runs 3.11",
        ),
        (
            'java.io.IOException: Cannot run program "python3": error=2, No such file',
            "there is no python3 on an executor",
        ),
        ("ModuleNotFoundError: No module named 'pyarrow'", "an executor's Python has no module pyarrow"),
        ("org.apache.spark.SparkException: odd", "no task could run: org.apache.spark.SparkException: odd"),
    ],
)
def test_why_not_even_one_task_ran_is_a_line(fails: str, says: str) -> None:
    assert says in refused(Needs(), fails)


def test_while_no_executor_runs_a_task_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probing, "WARN_SECS", 0.01)
    is_said = logging.getLogger("penstock.message")

    class Waiting(Executors):
        def collect(self) -> list[Any]:
            while not caplog.records:
                pass
            return super().collect()

    with caplog.at_level("WARNING", logger=is_said.name):
        probe(Waiting(), Needs(modules=()), 2)
    assert "no executor has run a task for" in caplog.text


@pytest.mark.parametrize(
    ("settings", "registered", "expected"),
    [
        ({}, 2, 0),
        ({"executor.instances": "4", "executor.cores": "3"}, 2, 12),
        ({"dynamicAllocation.enabled": "true"}, 2, 4),
        ({"dynamicAllocation.enabled": "true", "dynamicAllocation.maxExecutors": "50", "executor.cores": "2"}, 2, 4),
        ({"dynamicAllocation.enabled": "true", "dynamicAllocation.maxExecutors": "3"}, 2, 3),
    ],
)
def test_tasks_are_as_many_as_the_settings_ask_for_and_not_as_there_are_cores_yet(
    settings: dict[str, str], registered: int, expected: int
) -> None:
    conf = {f"spark.{name}": value for name, value in settings.items()}
    context = SimpleNamespace(master="spark://host:7077", _conf=conf, defaultParallelism=registered)
    assert expected_cores(context) == expected


def test_a_session_of_spark_connect_is_refused_in_a_line() -> None:
    remote = SimpleNamespace(client=None)  # what tells a classic session, it lacks
    with pytest.raises(ConfigError, match="PEN-1009 the session is a Spark Connect one") as error:
        SparkEngine(remote).start()
    assert "not with remote" in error.value.hint


STREAMING = """
connector_name = "kept"
[source]
connector = "generator"
rows = 10
[[routes]]
to = "/n"
sql = "SELECT count(*) AS n FROM input"
streaming = true
output_mode = "update"
[sink]
connector = "console"
"""


def test_the_state_of_streaming_routes_must_be_where_the_executors_are(tmp_path: Path) -> None:
    (tmp_path / "pipeline.toml").write_text(STREAMING)
    needs = Needs.of(Pipeline.from_toml(tmp_path / "pipeline.toml"))
    assert (str(tmp_path), "the state of streaming routes") in needs.directories, "`state` is not made yet"


PACKED = """
connector_name = "packed"
[source]
connector = "generator"
rows = 10
[sink]
connector = "console"
"""


def test_an_archive_holds_what_connectors_need_and_what_is_named(tmp_path: Path) -> None:
    (tmp_path / "pipeline.toml").write_text(PACKED)
    pipeline = Pipeline.from_toml(tmp_path / "pipeline.toml")
    packed = {each.partition(" ")[0] for each in pack(tmp_path / "more.tar.gz", pipeline, ["psutil"])}
    assert {"penstock", "pyarrow", "pydantic", "psutil"} <= packed
    assert not packed & {"pyspark", "deltalake"}
    with tarfile.open(tmp_path / "more.tar.gz") as archive:
        held = archive.getnames()
    assert {"bin/python", "lib/penstock/__main__.py", "lib/psutil/__init__.py"} <= set(held)
    with pytest.raises(ConfigError, match="PEN-1007 the package no-such-package is not installed here"):
        pack(tmp_path / "none.tar.gz", pipeline, ["no-such-package"])
