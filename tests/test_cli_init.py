"""`penstock init` for every connector: what it writes can be used, and its comments are true."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from penstock.cli import initial
from penstock.errors import ConfigError
from penstock.pipeline import Pipeline, registry
from penstock.sink import DeliveryGuarantee

POSTGRES = {"dsn": "postgresql://me@127.0.0.1/db", "tables": '["public.*"]'}
SOURCES = {
    "generator": {},
    "files": {"path": "in/*.jsonl"},
    "postgres_cdc": POSTGRES,
    "postgres_capture": POSTGRES,
    "kafka": {"bootstrap_servers": "127.0.0.1:9092", "topics": '["orders"]'},
    "sql_poll": {**POSTGRES, "tables": '["t"]', "key": '["id"]', "cursor": "id"},
    "webhook": {"port": "0", "endpoints": '[{ path = "/in", stream = "in" }]', "auth": '{ type = "none" }'},
    "http_poll": {"url": "http://127.0.0.1/items", "stream": "items"},
    "mqtt": {"url": "mqtt://127.0.0.1", "topics": '["a/#"]'},
    "danube": {"url": "http://127.0.0.1:6650", "topics": '["/default/x"]', "subscription": "s"},
    "tcp": {"url": "tcp://127.0.0.1:9000"},
    "websocket": {"url": "ws://127.0.0.1/"},
}
SINKS = {
    "console": {},
    "files": {"path": "lake/{topic}"},
    "delta": {"path": "lake/{topic}"},
    "iceberg": {"path": "lake/{topic}"},
    "postgres": {"dsn": POSTGRES["dsn"]},
    "kafka": {"bootstrap_servers": "127.0.0.1:9092"},
    "http": {"url": "http://127.0.0.1/items"},
    "mqtt": {"url": "mqtt://127.0.0.1"},
    "danube": {"url": "http://127.0.0.1:6650"},
}
TWICE = {"console", "http", "mqtt", "danube"}
"""Sinks that may write a row twice."""


def written(file: Path, source: str, sink: str) -> str:
    given = [f"{kind}.{name}={value}" for kind, options in (("source", SOURCES[source]), ("sink", SINKS[sink]))
             for name, value in options.items()]  # fmt: skip
    out = io.StringIO()
    initial.write(file, source, sink, "made", given, Console(file=out, width=300))
    return out.getvalue()


def test_every_connector_is_tried() -> None:
    found = {(entry.kind, entry.name) for entry in registry.BUILT_IN.values()}
    assert found == {*(("source", name) for name in SOURCES), *(("sink", name) for name in SINKS)}


@pytest.mark.parametrize("source", SOURCES)
def test_every_pair_can_be_loaded_with_the_best_guarantee_that_it_can_keep(source: str, tmp_path: Path) -> None:
    for sink in SINKS:
        file = tmp_path / f"{sink}.toml"
        said = written(file, source, sink)
        assert "next: penstock check" in said, said
        best = DeliveryGuarantee.AT_LEAST_ONCE if sink in TWICE else DeliveryGuarantee.EXACTLY_ONCE
        assert Pipeline.from_toml(file).delivery is best
        assert ("delivery is at-least-once: " in said) == (sink in TWICE)


@pytest.mark.parametrize(
    ("source", "sink"), [*((name, "files") for name in SOURCES), *(("generator", name) for name in SINKS)]
)
def test_a_default_that_is_taken_out_of_its_comment_changes_nothing(source: str, sink: str, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    written(file, source, sink)
    before = Pipeline.from_toml(file)
    text = re.sub(r"^# (?=[a-z_]+ = [^…]*$)", "", file.read_text().partition("# [[schemas]]")[0], flags=re.MULTILINE)
    file.write_text(text)
    after = Pipeline.from_toml(file)
    for kind in ("sources", "sinks"):
        for name, connector in getattr(before, kind).items():
            assert getattr(after, kind)[name].config == connector.config
    options = registry.config_of(registry.load("source", source)).model_fields
    assert len(re.findall(r"^#? ?[a-z_]+ = ", text.partition("[source]")[2].partition("[sink]")[0], re.M)) > len(
        options
    )


def test_where_nobody_can_be_asked_it_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    console = Console(file=io.StringIO())
    with pytest.raises(ConfigError) as refused:
        initial.write(tmp_path / "a.toml", "kafka", "delta", None, ["sink.path=lake"], console)
    assert refused.value.hint == "--set source.bootstrap_servers=… --set source.topics=…"
    with pytest.raises(ConfigError, match="there is no such option"):
        initial.write(tmp_path / "a.toml", "generator", "console", None, ["source.rowss=1"], console)
    assert not (tmp_path / "a.toml").exists()
