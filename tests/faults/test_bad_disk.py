"""A disk that refuses: told as such, with the place and what to do, and nothing is lost or doubled once it takes writes again."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.files.sink import FilesSink, FilesSinkConfig, read_published
from penstock.connectors.generator import Generator, GeneratorConfig
from penstock.errors import FatalError
from penstock.pipeline import Pipeline, Processing
from penstock.pipeline.routing import Router
from penstock.runtime import supervisor
from penstock.runtime.epochs import State
from penstock.sink import DeliveryGuarantee
from penstock.testing.engine import Forked, ForkEngine


def with_files_of_at_most(size: int, work: Callable[[], Any]) -> Any:
    """Do `work` in a process whose files cannot grow beyond `size`: as near to a full disk as a test without root gets."""

    def limited() -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return work()

    return Forked(limited).result()


@pytest.fixture
def drain(tmp_path: Path) -> Callable[[Any], supervisor.Summary]:
    def drain(sink: Any) -> supervisor.Summary:
        pipeline = Pipeline(
            "on-a-bad-disk",
            sources={"source": Generator(GeneratorConfig(rows=20_000, columns=("id", "code")))},
            sinks={"lake": sink},
            router=Router((), ("lake",)),
            delivery=DeliveryGuarantee.EXACTLY_ONCE,
            processing=Processing(state_dir=tmp_path / "state"),
        )
        return supervisor.run(pipeline, engine=ForkEngine(2), drain=True)

    return drain


def test_a_full_target_of_files_is_told_as_such_and_its_rows_follow(tmp_path: Path, drain: Any) -> None:
    sink = FilesSink(FilesSinkConfig(path=str(tmp_path / "lake" / "{topic}")))
    with pytest.raises(FatalError, match=rf"PEN-5009 cannot write {tmp_path}/lake.*: File too large"):
        with_files_of_at_most(20_000, lambda: drain(sink))
    assert drain(sink).rows_out == 20_000
    assert sorted(read_published(tmp_path / "lake" / "rows")["id"].to_pylist()) == list(range(20_000))


def test_a_full_target_of_delta_is_told_as_such_and_its_rows_follow(tmp_path: Path, drain: Any) -> None:
    from deltalake import DeltaTable

    sink = Delta(DeltaConfig(path=str(tmp_path / "lake" / "{topic}")))
    with pytest.raises(FatalError, match=rf"PEN-5009 cannot write {tmp_path}/lake.*: File too large"):
        with_files_of_at_most(20_000, lambda: drain(sink))
    assert drain(sink).rows_out == 20_000
    ids = DeltaTable(tmp_path / "lake" / "rows").to_pyarrow_table()["id"].to_pylist()
    assert sorted(ids) == list(range(20_000))


def test_a_disk_that_is_full_before_the_lock_is_written_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(FatalError, match=rf"PEN-5009 cannot write {tmp_path}/lock: File too large"):
        with_files_of_at_most(0, lambda: State(tmp_path, "p").open())
    State(tmp_path, "p").open()


def test_a_directory_below_a_file_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FatalError, match=r"PEN-5009 cannot write .*: Not a directory\n.*a file is where"):
        State(tmp_path / "file" / "state", "p").open()
