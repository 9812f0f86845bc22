"""The embedded registry when its process dies at any step, and when several processes use it at once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import FatalError
from penstock.formats import WireSchema
from penstock.schema.compatibility import Compatibility
from penstock.schema.registry.embedded import Embedded, EmbeddedConfig

CALLS = ("fsync", "link", "replace", "unlink", "mkdir", "open")


def schema(number: int) -> WireSchema:
    fields = [{"name": f"f{each}", "type": "long", "default": 0} for each in range(number + 1)]
    return WireSchema("avro", json.dumps({"type": "record", "name": "R", "fields": fields}))


def opened(path: Path) -> Embedded:
    return Embedded(EmbeddedConfig(), path)


def in_a_child(work: Callable[[], object]) -> int:
    """Do the work in a process of its own; the status it ends with."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - nothing of pytest may run on in the child
            os._exit(1)
    return os.waitpid(child, 0)[1]


def die_at(step: int, after: bool) -> None:
    """From now on in this process: SIGKILL before or after the call of the system that has this number."""
    left = [step]

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **named)
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted

    for name in CALLS:
        setattr(os, name, watched(getattr(os, name)))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_any_step_leaves_a_registry_that_opens_and_has_no_half_version(tmp_path, after):
    killed = 0
    for step in range(200):
        path = tmp_path / f"{step}"
        opened(path).register_schema("s", schema(0))

        def work(path=path, step=step):
            die_at(step, after)
            opened(path).register_schema("s", schema(1))

        status = in_a_child(work)
        assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
        registry = opened(path)
        versions = registry.versions("s")
        assert versions in ([1], [1, 2])
        assert [registry.fetch_schema("s", each).text for each in versions] == [
            schema(0).text,
            schema(1).text,
        ][: len(versions)]
        again = registry.register_schema("s", schema(1))
        assert (again.version, again.id) == (2, 2)
        assert registry.fetch_schema_by_id(2) == again
        assert registry.register_schema("s", schema(2)).id == 3
        if os.WIFEXITED(status):
            break
        killed += 1
    assert killed > 8
    assert os.WIFEXITED(status)


def test_processes_that_register_at_once_get_one_number_each(tmp_path):
    processes = 6
    opened(tmp_path).set_compatibility("s", Compatibility.NONE)
    gate_read, gate_write = os.pipe()
    children = []
    for number in range(processes):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(gate_write)
                os.read(gate_read, 1)  # until all are there
                made = [opened(tmp_path).register_schema("s", schema(each)) for each in (number, 50, number + 10)]
                (tmp_path / f"made-{number}").write_text(json.dumps([[each.version, each.id] for each in made]))
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    os.close(gate_write)
    os.close(gate_read)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * processes
    told = [json.loads((tmp_path / f"made-{number}").read_text()) for number in range(processes)]
    registry = opened(tmp_path)
    assert registry.versions("s") == list(range(1, 2 * processes + 2))
    assert len({tuple(each[1]) for each in told}) == 1, "the schema that all registered has one version"
    for number, (own, _, other) in enumerate(told):
        for (version, id), expected in ((own, schema(number)), (other, schema(number + 10))):
            found = registry.fetch_schema("s", version)
            assert (found.id, found.text) == (id, expected.text)
    ids = {registry.fetch_schema("s", each).id for each in registry.versions("s")}
    assert len(ids) == 2 * processes + 1


@pytest.mark.parametrize("call", range(1, 8))
def test_a_schema_that_another_registers_at_any_moment_has_one_version(tmp_path, monkeypatch, call):
    registry, other = opened(tmp_path), opened(tmp_path)
    listed, calls = registry.versions, []

    def overtaken(subject: str) -> list[int]:
        calls.append(subject)
        if len(calls) == call:
            other.register_schema("s", schema(0))
        return listed(subject)

    monkeypatch.setattr(registry, "versions", overtaken)
    registry.register_schema("s", schema(0))
    assert listed("s") == [1]


def test_a_version_that_came_in_between_counts_in_the_check(tmp_path, monkeypatch):
    registry, other = opened(tmp_path), opened(tmp_path)
    wrong = WireSchema("avro", schema(0).text.replace("long", "string").replace("0}", '"0"}'))
    publish = registry._publish

    def overtaken(path: Path, value: Any) -> bool:
        if path.parent.name == "s" and not other.versions("s"):
            other.register_schema("s", schema(0))
        return publish(path, value)

    monkeypatch.setattr(registry, "_publish", overtaken)
    with pytest.raises(Exception, match="PEN-4030"):
        registry.register_schema("s", wrong)
    assert registry.versions("s") == [1]


def test_a_file_that_was_changed_by_hand_is_found(tmp_path):
    registry = opened(tmp_path)
    made = registry.register_schema("s", schema(0))
    (content,) = (tmp_path / "schemas" / "content").iterdir()
    content.write_text(content.read_text().replace("f0", "g0"))
    with pytest.raises(FatalError, match="PEN-5040"):
        registry.fetch_schema_by_id(made.id)
    content.write_text("{")
    with pytest.raises(FatalError, match="PEN-5040"):
        registry.fetch_schema("s")
