"""`penstock check` on a cluster: one task there reveals every secret, opens every sink, and lets it write and delete a probe."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConnectorError
from penstock.pipeline import Pipeline
from penstock.sink import SinkConnector
from penstock.source import Connector, Finding
from penstock.spark.probe import Needs, secrets_of
from penstock.spark.session import is_local


def on_cluster(pipeline: Pipeline, master: str | None, log: Path) -> Sequence[Finding]:
    """What is wrong there; nothing for a master whose tasks run in processes of this machine."""
    if master is None or is_local(master):
        return ()
    from penstock.spark.engine import SparkEngine  # starts slowly

    engine = SparkEngine(
        master=master, name=f"{pipeline.name} · check", log=log, ship=pipeline.third_party, needs=Needs.of(pipeline)
    )
    try:
        engine.start()  # looks for modules, variables, files and directories on every executor
        connectors: dict[str, Connector[Any]] = {f"source {name}": each for name, each in pipeline.sources.items()}
        connectors |= {f"sink {name}": each for name, each in pipeline.sinks.items()}
        return rehearse(engine.session.sparkContext, connectors)
    except ConnectorError as error:
        return [Finding(False, f"{error.code} {error.message}", error.hint)]
    finally:
        engine.stop()


def rehearse(context: Any, connectors: Mapping[str, Connector[Any]]) -> Sequence[Finding]:
    """Run the task."""
    from penstock.spark.tasks import pack

    (found,) = context.parallelize([0], 1).mapPartitions(_looker(pack(dict(connectors)))).collect()
    return [Finding(*each) for each in pickle.loads(found)]


def _looker(packed: bytes) -> Callable[[Iterable[int]], Iterator[bytes]]:
    def look(nothing: Iterable[int]) -> Iterator[bytes]:
        list(nothing)
        found = [finding for name, each in pickle.loads(packed).items() for finding in looked_at(name, each)]
        yield pickle.dumps([(each.ok, each.what, each.fix) for each in found])

    return look


def looked_at(name: str, connector: Connector[Any]) -> Iterator[Finding]:
    """What a task finds; sources are not opened, for some may be open once only."""
    try:
        for secret in secrets_of(connector.config):
            secret.reveal()
        if isinstance(connector, SinkConnector):
            try:
                connector.open()
                for each in connector.check():
                    yield Finding(each.ok, f"in a task, {name}: {each.what}", each.fix)
            finally:
                connector.close()
    except ConnectorError as error:
        yield Finding(False, f"in a task, {name}: {error.code} {error.message}", error.hint)
    else:
        yield Finding(True, f"in a task, {name}: secrets are there")
