"""The contract modules: every name has a user, every hook is called by the runtime, and no class asks too much of an author."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.errors import RetryableError
from penstock.pipeline.routing import Route, Router
from penstock.runtime.epochs import EpochLoop, State
from penstock.schema.evolution import Policy
from penstock.sink import SinkConnector, SinkContext, Topic, TopicContext, TopicSink
from penstock.source import ProducerConfig, RangeSource, SourceContext
from penstock.tables import TableSource
from penstock.testing import ForkEngine, MemorySink, MemorySinkConfig, MemorySource, MemorySourceConfig

PACKAGE = Path(penstock.__file__).parent

CONTRACTS = ("health.py", "source.py", "tables.py", "capture.py", "sink.py", "schema/__init__.py")

USERS = ("schema/registry", "connectors", "pipeline", "runtime", "spark", "web", "cli", "reference.py")

LATER: dict[str, str] = {}
"""Names without a user yet, and who will bring one. Take a name out as soon as it has one."""


def public(tree: ast.Module) -> Iterator[str]:
    """What a module offers: its classes, functions and constants, and the members of its classes."""
    for node in tree.body:
        yield from named(node)
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                yield from named(member)


def named(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        names = [node.name]
    elif isinstance(node, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        names = [node.target.id]
    else:
        names = []
    yield from (name for name in names if not name.startswith("_") and name != "model_config")


def used(tree: ast.Module, defined: bool = True) -> Iterator[str]:
    """The names that a module reads, calls or passes on; with `defined` also those that it implements."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef) and defined:
            yield node.name
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.alias):
            yield node.name


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.fixture(scope="module")
def unused() -> set[str]:
    offered = {name for module in CONTRACTS for name in public(parsed(PACKAGE / module))}
    users = [path for user in USERS for path in [PACKAGE / user, *(PACKAGE / user).rglob("*.py")] if path.suffix]
    taken = {name for path in users for name in used(parsed(path))}
    # What another part of the contract reads or hands over counts with it.
    inside = {name for module in CONTRACTS for name in used(parsed(PACKAGE / module), defined=False)}
    return offered - taken - inside


def test_every_public_name_of_the_contract_has_a_user(unused: set[str]) -> None:
    assert sorted(unused - LATER.keys()) == []


def test_the_list_of_names_without_a_user_is_up_to_date(unused: set[str]) -> None:
    assert sorted(LATER.keys() - unused) == []


def methods(kind: type) -> list[str]:
    return [name for name, each in vars(kind).items() if isinstance(each, FunctionType) and not name.startswith("_")]


def test_an_author_has_few_methods_to_know() -> None:
    assert len({*methods(RangeSource), "open", "schema"}) <= 8
    assert methods(TableSource) == ["tables"]
    provided = {"open", "policy", "rollback_epoch"}  # inherited as they are
    assert len(set(methods(SinkConnector)) - provided) <= 10


# -- what the runtime does with the hooks ---------------------------------------------------------------------------------


class Told(MemorySink):
    """Writes down what is called, in all processes."""

    def _tell(self, what: str) -> None:
        with open(self.config.path / "told", "a") as file:
            file.write(f"{what}\n")

    def flush(self) -> None:
        self._tell("flush")

    def pre_commit(self, epoch: Any) -> Any:
        self._tell("pre_commit")
        return super().pre_commit(epoch)

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> Any:
        known = self.context.topic(topic)
        self._tell(f"write_batch {self.policy(topic)} {known.source_schema.names if known.source_schema else None}")
        if (self.config.path / "fail").exists():
            (self.config.path / "fail").unlink()
            raise RetryableError("once")
        return super().write_batch(topic, batch)

    def committed_epoch(self, pipeline: str, topic: Topic) -> Any:
        self._tell("committed_epoch")
        return super().committed_epoch(pipeline, topic)

    def rollback_epoch(self, epoch: Any, receipts: Any) -> None:
        self._tell("rollback_epoch")
        super().rollback_epoch(epoch, receipts)


class Asks(MemorySource):
    """Wants its topics in two partitions, whatever the routes say."""

    def producer_configs(self) -> list[ProducerConfig]:
        return [replace(config, partitions=2) for config in super().producer_configs()]


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[EpochLoop]:
    (tmp_path / "source").mkdir()
    (tmp_path / "lake").mkdir()
    source = MemorySource(MemorySourceConfig(path=tmp_path / "source", script=({"id": 1}, {"id": 2})))
    sink = Told(MemorySinkConfig(path=tmp_path / "lake"))
    router = Router((Route(to="/lake/orders", schema_evolution=Policy.FREEZE),), ("lake",))
    made = EpochLoop(State(tmp_path / "state", "told"), {"memory": source}, {"lake": sink}, router, ForkEngine(1))
    made.state.open()
    made.contexts.open()
    made.start([("lake", "/lake/orders")])
    yield made
    made.state.close()


def told(tmp_path: Path) -> list[str]:
    return (tmp_path / "lake" / "told").read_text().splitlines()


def test_rows_are_flushed_before_they_are_promised(loop: EpochLoop, tmp_path: Path) -> None:
    assert loop.step() is not None
    calls = [call for call in told(tmp_path) if call in ("flush", "pre_commit")]
    assert calls == ["flush", "pre_commit"]


def test_a_failed_stage_is_rolled_back_once_the_target_has_said_no(loop: EpochLoop, tmp_path: Path) -> None:
    (tmp_path / "lake" / "fail").touch()
    with pytest.raises(RetryableError):
        loop.step()
    assert "rollback_epoch" not in told(tmp_path)
    assert loop.step() is not None
    calls = told(tmp_path)
    at = calls.index("rollback_epoch")
    assert "committed_epoch" in calls[:at]
    assert "pre_commit" in calls[at:]


def test_a_task_opens_its_sinks_with_what_is_known_of_their_topics(loop: EpochLoop, tmp_path: Path) -> None:
    assert loop.step() is not None
    assert "write_batch freeze ['id']" in told(tmp_path)


def test_a_sink_on_the_driver_sees_what_is_learned_after_it_was_opened(loop: EpochLoop) -> None:
    sink = loop.sinks["lake"]
    before = sink.context.topic("/lake/orders")
    assert loop.step() is not None
    after = sink.context.topic("/lake/orders")
    assert (before.source_schema, after.policy) == (None, Policy.FREEZE)
    assert after.source_schema.names == ["id"]


def test_a_source_is_opened_with_a_directory_of_its_own_and_the_topics_of_its_routes(
    loop: EpochLoop, tmp_path: Path
) -> None:
    context = loop.sources["memory"].context
    assert context.state_dir == tmp_path / "state" / "sources" / "memory"
    assert context.produces == (ProducerConfig("/lake/orders"),) == tuple(loop.sources["memory"].producer_configs())
    assert list(context.copies_of("no.such")) == [False]
    assert not context.in_task


def test_a_copy_is_made_from_the_config_however_far_the_original_has_come(loop: EpochLoop) -> None:
    loop.step()
    for connector in (loop.sources["memory"], loop.sinks["lake"]):
        copy = pickle.loads(pickle.dumps(connector))
        assert (type(copy), copy.config) == (type(connector), connector.config)
        assert vars(copy).keys() == vars(type(connector)(connector.config)).keys()


def test_a_sink_context_travels_as_a_plain_mapping() -> None:
    live: dict[Topic, TopicContext] = {"/a": TopicContext(policy=Policy.EVOLVE)}
    copy = pickle.loads(pickle.dumps(SinkContext(live, Path("own"), "lake")))
    assert (copy.state_dir, copy.name) == (Path("own"), "lake")
    live["/b"] = TopicContext(refilled=True)
    assert (copy.topic("/a").policy, copy.topic("/b")) == (Policy.EVOLVE, TopicContext())


def test_connectors_open_without_a_context(tmp_path: Path) -> None:
    source = MemorySource(MemorySourceConfig(path=tmp_path))
    source.open()
    assert source.context == SourceContext()
    assert source.producer_configs() == ()
    assert issubclass(MemorySink, TopicSink)
