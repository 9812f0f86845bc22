"""The examples of webhook, http_poll and http run against their counterparts, and the page's own request is taken."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from connectors.pushed import free_port
from connectors.receiver import Asked, receiving
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.testing import ForkEngine
from penstock.testing.processes import wait_until

ROOT = Path(__file__).parent.parent.parent


def example(directory: Path, name: str, old: str, new: str) -> Path:
    """A copy of the examples, in which a text of one is another."""
    file = Path(shutil.copytree(ROOT / "examples", directory / "examples")) / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    return file


def drained(file: Path) -> supervisor.Summary:
    return supervisor.run(Pipeline.from_toml(file), ForkEngine(1), drain=True)


def rows(path: Path) -> list[dict[str, Any]]:
    found = DeltaTable(path).to_pyarrow_table() if DeltaTable.is_deltatable(str(path)) else None
    return sorted(found.to_pylist(), key=lambda row: row["id"]) if found is not None else []


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("openssl")), reason="curl or openssl is not installed")
def test_the_webhook_example_takes_what_the_page_sends_and_refuses_what_its_schema_does(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOP_SECRET", "correct horse")
    port = free_port()
    file = example(tmp_path, "webhook.toml", "port = 8080", f"port = {port}")
    page = (ROOT / "docs" / "webhook.md").read_text()
    script = re.search(r"```sh\n(body=.*?)```", page, re.DOTALL)
    assert script is not None
    stop, ended = threading.Event(), []
    pipeline = Pipeline.from_toml(file)
    run = threading.Thread(target=lambda: ended.append(supervisor.run(pipeline, ForkEngine(1), stop=stop)))
    run.start()
    try:
        wait_until(lambda: _listens(port), "the server")

        def send(text: str) -> str:
            shell = subprocess.run(["sh", "-c", text], env=os.environ, capture_output=True, text=True, check=True)
            return shell.stdout

        sent = script.group(1).replace("8080", str(port))
        assert send(sent).startswith("HTTP/1.1 200 OK")
        assert send(sent).startswith("HTTP/1.1 200 OK")  # a retry: stored once
        refused = send(sent.replace('"amount": 9.5', '"amount": "much"'))
        assert refused.startswith("HTTP/1.1 422 ")
        assert "json_schema.type" in refused
        assert send(sent.replace("$SHOP_SECRET", "wrong")).startswith("HTTP/1.1 401 ")
        lake = tmp_path / "run" / "webhook" / "lake" / "orders"
        assert wait_until(lambda: rows(lake), "the order") == [{"id": 1, "amount": 9.5, "country": "CH"}]
    finally:
        stop.set()
        run.join(60)
    assert len(ended) == 1


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_the_http_poll_example_mirrors_an_api(tmp_path):
    orders = {id: {"id": id, "total": id * 1.5} for id in range(5)}

    def answer(asked: Asked) -> Any:
        start = int(asked.query.get("cursor", 0))
        items = sorted(orders.values(), key=lambda each: each["id"])
        more = {"next_cursor": str(start + 2)} if start + 2 < len(items) else {}
        return 200, {"data": {"items": items[start : start + 2]}, **more}

    with receiving(answer) as api:
        file = example(tmp_path, "http_poll.toml", "http://127.0.0.1:8081", api.url)
        lake = tmp_path / "run" / "http-poll" / "lake" / "orders"
        for _ in range(2):
            drained(file)
            assert [(row["id"], row["total"]) for row in rows(lake)] == [(id, id * 1.5) for id in sorted(orders)]
            orders.pop(3, None)
            orders[9] = {"id": 9, "total": 13.5}


def test_the_http_example_sends_the_rows_of_files(tmp_path):
    with receiving() as api:
        file = example(tmp_path, "http.toml", "http://127.0.0.1:8082", api.url)
        assert drained(file).rows_out == 12
        assert drained(file).rows_in == 0
        lines = [line for asked in api.asked for line in asked.body.splitlines()]
        assert len(lines) == len(set(lines)) == 12
