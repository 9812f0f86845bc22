"""A state directory that is a copy of a log in a store: what is recorded is what the next run finds, and only one run records."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import store
from penstock.durable import write_atomic
from penstock.errors import ConnectorError, FatalError, Fenced, RetryableError
from penstock.pipeline import Processing
from penstock.runtime.epochs import Manifest, Range, State, replica
from penstock.runtime.epochs.replica import Replica


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "LEASE_SECS", 0.15)


@pytest.fixture
def opened() -> Iterator[Any]:
    """Opens replicas, which end with the test."""
    every: list[Replica] = []

    def make(place: store.Place, directory: Path) -> Replica:
        made = Replica(place, directory, f"the run in {directory.name}")
        made.open()
        every.append(made)
        return made

    yield make
    for each in every:
        each.close()


def kill(running: Replica) -> None:
    """As SIGKILL leaves it: the lease stays, and nobody renews it."""
    lease = running._lease
    assert lease is not None
    lease._done.set()
    running._lease = None


def content(directory: Path) -> dict[str, bytes]:
    return {path: (directory / path).read_bytes() for path in replica._files(directory)}


def test_the_next_run_finds_what_was_recorded_wherever_it_starts(opened: Any, tmp_path: Path) -> None:
    first = opened(tmp_path / "store", tmp_path / "a")
    (tmp_path / "a" / "journal").mkdir()
    with open(tmp_path / "a" / "journal" / "0.arrow", "ab", buffering=0) as file:
        for number in range(3):
            write_atomic(tmp_path / "a" / "position.json", b"%d" % number)
            file.write(b"rows %d;" % number * 1000)
            first.record()
    (tmp_path / "a" / "gone").write_bytes(b"for a while")
    first.record()
    (tmp_path / "a" / "gone").unlink()
    first.record()
    (tmp_path / "a" / "lost").write_bytes(b"never recorded")
    (tmp_path / "a" / "status.json").write_bytes(b"of this machine")
    kill(first)
    opened(tmp_path / "store", tmp_path / "b")
    expected = b"".join(b"rows %d;" % number * 1000 for number in range(3))
    assert content(tmp_path / "b") == {"position.json": b"2", "journal/0.arrow": expected}
    whole = [entry.size for entry in store.listed(tmp_path / "store" / "log")]
    assert sum(whole) < 2 * len(expected), "of a file that grows only what is new is recorded"


def test_a_run_that_was_taken_for_dead_records_nothing_more(opened: Any, tmp_path: Path) -> None:
    zombie = opened(tmp_path / "store", tmp_path / "a")
    (tmp_path / "a" / "n").write_bytes(b"1")
    zombie.record()
    kill(zombie)
    successor = opened(tmp_path / "store", tmp_path / "b")
    for number in range(100):  # until what the first run has written is replaced, and deleted
        write_atomic(tmp_path / "b" / "n", b"%d" % number)
        successor.record()
    (tmp_path / "a" / "n").write_bytes(b"of the zombie")
    for _ in range(2):
        with pytest.raises(Fenced, match="PEN-5008 the run in b has taken over"):
            zombie.record()
    kill(successor)
    opened(tmp_path / "store", tmp_path / "c")
    assert content(tmp_path / "c") == {"n": b"99"}
    assert len(store.names(tmp_path / "store" / "log")) < 40


def test_a_second_run_is_refused_while_the_first_one_lives(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "LEASE_SECS", 3.0)  # renewed every second, also on a busy machine
    first = opened(tmp_path / "store", tmp_path / "a")
    with pytest.raises(FatalError, match=r"PEN-5002 .* is in use by the run in a"):
        opened(tmp_path / "store", tmp_path / "b")
    (tmp_path / "a" / "n").write_bytes(b"1")
    first.record()  # it was not disturbed


def test_a_run_that_ended_by_itself_keeps_nobody_waiting(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "LEASE_SECS", 1e6)
    opened(tmp_path / "store", tmp_path / "a").close()
    kill(opened(tmp_path / "store", tmp_path / "b"))
    opened(tmp_path / "store", tmp_path / "b")  # the lock of the directory says that the run before is dead


def test_a_directory_that_had_no_store_brings_what_it_has(opened: Any, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "pipeline.json").write_bytes(b"{}")
    kill(opened(tmp_path / "store", tmp_path / "a"))
    kill(opened(tmp_path / "store", tmp_path / "b"))
    assert content(tmp_path / "b") == {"pipeline.json": b"{}"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pipeline.json").write_bytes(b"another")
    with pytest.raises(FatalError, match=r"PEN-5003 .*other holds a state of its own"):
        opened(tmp_path / "store", tmp_path / "other")
    assert content(tmp_path / "other") == {"pipeline.json": b"another"}, "nothing of it was touched"


def test_commands_that_wait_here_are_there_when_the_run_begins(opened: Any, tmp_path: Path) -> None:
    kill(opened(tmp_path / "store", tmp_path / "a"))
    for waits in ("requests", "sources/shop/requests"):
        (tmp_path / "a" / waits).mkdir(parents=True)
        (tmp_path / "a" / waits / "1.json").write_bytes(b"{}")
    opened(tmp_path / "store", tmp_path / "a")
    assert (tmp_path / "a" / "requests" / "1.json").exists()
    assert (tmp_path / "a" / "sources" / "shop" / "requests" / "1.json").exists()


def test_a_copy_is_not_run_without_its_store(tmp_path: Path) -> None:
    kept = State(tmp_path / "a", "p", tmp_path / "store")
    kept.open()
    kept.close()
    with pytest.raises(FatalError, match=r"PEN-5003 .*a is a copy of the state in") as refused:
        State(tmp_path / "a", "p").open()
    assert "state_store" in refused.value.hint


def test_whichever_entries_are_deleted_first_the_rest_says_the_same(opened: Any, tmp_path: Path) -> None:
    choice, a = random.Random(17), tmp_path / "a"
    running = opened(tmp_path / "store", a)
    for number in range(300):
        name = a / f"{choice.randrange(6)}{choice.choice(['', '.jsonl'])}"
        if choice.random() < 0.3:
            name.unlink(missing_ok=True)
        elif name.suffix and name.exists() and choice.random() < 0.8:
            with open(name, "ab") as file:
                file.write(b"%d," % number)
        else:
            write_atomic(name, b"%d" % number)
        running.record(*([name] if name.exists() and choice.random() < 0.5 else []))
        ready = running._garbage.ready()
        some = choice.sample(ready, min(len(ready), choice.randrange(3)))
        store.delete([running._at(each) for each in some])
        running._garbage.deleted(some)
        if number % 20 == 0:
            shutil.rmtree(tmp_path / "b", ignore_errors=True)
            Replica(tmp_path / "store", tmp_path / "b", "a look").fetch()
            assert content(tmp_path / "b") == content(a), number


def test_an_answer_that_never_comes_ends_the_run(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "PATIENCE_SECS", 0.3)
    running = opened(tmp_path / "store", tmp_path / "a")
    is_there = threading.Event()
    create = store.create

    def unclear(place: Any, data: bytes) -> bool:
        if is_there.is_set():
            return create(place, data)
        raise RetryableError("no answer", code="PEN-2003")

    monkeypatch.setattr(store, "create", unclear)
    (tmp_path / "a" / "n").write_bytes(b"1")
    with pytest.raises(FatalError, match=r"PEN-5009 .*cannot be written: no answer"):
        running.record()
    is_there.set()
    with pytest.raises(FatalError, match="PEN-5009"):  # what is true, only the next run can find out
        running.record()


def manifest(number: int, state: Any = "planned") -> Manifest:
    span = {"source": Range(start=number, end=number + 1)}
    return Manifest(pipeline="p", incarnation="", number=number, state=state, ranges=span, attempts=["a"])


def test_a_state_in_an_object_store_moves_from_machine_to_machine(s3: Any, tmp_path: Path) -> None:
    where = f"{s3.bucket()}/state"
    kept = Processing.model_validate({"state_dir": where, "state_options": s3.options()})
    assert kept.state_place is not None
    assert str(kept.state_dir) == "state"
    first = State(tmp_path / "a", "p", kept.state_place)
    first.open()
    incarnation = first.identity.incarnation
    for state in ("planned", "prepared"):
        first.save(manifest(1, state).model_copy(update={"incarnation": incarnation}))
    kill(first._replica)  # type: ignore[arg-type]
    second = State(tmp_path / "b", "p", kept.state_place)
    second.open()
    assert second.newest is not None
    assert (second.newest.number, second.newest.state, second.identity.incarnation) == (1, "prepared", incarnation)
    with pytest.raises(Fenced, match="has taken over the state in s3://"):
        first.save(manifest(1, "committed").model_copy(update={"incarnation": incarnation}))
    second.save(manifest(1, "committed").model_copy(update={"incarnation": incarnation}))
    looked = State(tmp_path / "c", "p", kept.state_place).peek()
    assert looked.newest is not None
    assert looked.newest.state == "committed"
    second.close()
    first.close()


FILE = """
connector_name = "a"
[processing]
state_dir = "{where}"
state_options = {{ {options} }}
[source]
connector = "generator"
rows = 10
[[schemas]]
topic = "/rows"
subject = "s"
schema_type = "json_schema"
schema_file = "s.json"
auto_register = false
[sink]
connector = "console"
"""


def test_a_schema_that_is_registered_on_one_machine_is_known_on_another(s3: Any, tmp_path: Path) -> None:
    def toml(value: Any) -> str:
        return f'{{ env = "{value["env"]}" }}' if isinstance(value, dict) else f'"{value}"'

    options = ", ".join(f"{name} = {toml(value)}" for name, value in s3.options().items())
    text = FILE.format(where=f"{s3.bucket()}/state", options=options)
    for machine, command in (("a", "register"), ("b", "check")):
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "pipeline.toml").write_text(text)
        (tmp_path / machine / "s.json").write_text('{"type": "object"}')
        asked = [sys.executable, "-m", "penstock", "schemas", command, "pipeline.toml"]
        done = subprocess.run(asked, cwd=tmp_path / machine, capture_output=True, text=True)
        assert "ok s: " in done.stdout, done.stdout + done.stderr


def test_a_store_without_conditional_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(below: Any) -> None:
        raise ConnectorError("the store ignores conditional writes", code="PEN-1040")

    monkeypatch.setattr(store, "refuse_without_conditions", refuse)
    with pytest.raises(ConnectorError, match="PEN-1040"):
        Replica(tmp_path / "store", tmp_path / "a", "a run").open()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"state_dir": "s3://a/b", "state_store": "s3://a/b"}, "give the address as `state_store`"),
        ({"state_store": "/a/b"}, "name a directory as `state_dir`"),
        ({"state_dir": "http://a/b"}, "begins with one of s3://"),
    ],
)
def test_what_is_no_place_for_a_state_is_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Processing.model_validate(given)
