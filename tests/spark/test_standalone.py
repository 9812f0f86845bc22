"""A real standalone cluster: executors as another user, with an environment of their own, and nothing of the driver's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pyspark.find_spark_home import _find_spark_home
from standalone import Cluster

import penstock
from connectors.receiver import Asked, Says, receiving
from penstock.pipeline import Pipeline
from penstock.spark.pack import pack
from penstock.testing.postgres import PostgresServer

pytestmark = pytest.mark.soak  # six JVMs

APPLICATION = Path(penstock.__file__).parent / "__main__.py"

PIPELINE = """
connector_name = "{name}"
delivery = "exactly-once"

[source]
connector = "generator"
rows = 20000
columns = ["id", "name"]

[[routes]]
to = "/{name}/plain"

[[routes]]
to = "/{name}/sql"
sql = "SELECT id, upper(name) AS name FROM input WHERE id % 2 = 0"

[sink]
{sink}
"""


@pytest.fixture(scope="module")
def cluster(java: None) -> Iterator[Cluster]:
    with Cluster() as running:
        yield running


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, server: PostgresServer) -> Path:
    """What `penstock pack` makes."""
    home = tmp_path_factory.mktemp("packed")
    (home / "pipeline.toml").write_text(PIPELINE.format(name="packed", sink=sink(server)))
    pack(home / "environment.tar.gz", Pipeline.from_toml(home / "pipeline.toml"))
    return home / "environment.tar.gz"


def sink(server: PostgresServer) -> str:
    return f'connector = "postgres"\ndsn = "{server.dsn}"'


def submit(
    cluster: Cluster, home: Path, text: str, environment: Path | None, *more: str
) -> subprocess.CompletedProcess[str]:
    home.chmod(0o700)
    (home / "pipeline.toml").write_text(text)
    archives = ("--archives", f"{environment}#environment") if environment else ()
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYSPARK") and key != "PYTHONPATH"}
    if environment:
        own["PYSPARK_PYTHON"] = "./environment/bin/python"
    own |= {"PYSPARK_DRIVER_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    options = ("--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.executor.memory=512m", *more)
    return subprocess.run(
        [
            *(f"{_find_spark_home()}/bin/spark-submit", "--master", cluster.url, *archives, *options),
            *(str(APPLICATION), "run", str(home / "pipeline.toml"), "--drain"),
        ],
        capture_output=True,
        text=True,
        env=own,
        cwd=home,
    )


@pytest.mark.timeout(1200)
def test_a_submitted_pipeline_runs_where_nothing_of_the_driver_is(
    cluster: Cluster, environment: Path, server: PostgresServer, tmp_path: Path
) -> None:
    done = submit(cluster, tmp_path, PIPELINE.format(name="submitted", sink=sink(server)), environment)
    assert done.returncode == 0, done.stderr[-3000:] + cluster.log
    assert cluster.url in (tmp_path / "state" / "status.json").read_text(), "the master of the submit"
    with psycopg.connect(server.dsn) as connection:
        plain = connection.execute("SELECT id FROM submitted.plain ORDER BY id").fetchall()
        sql = connection.execute("SELECT count(*), count(DISTINCT id) FROM submitted.sql").fetchone()
    assert [row[0] for row in plain] == list(range(20000))
    assert sql == (10000, 10000)


@pytest.mark.timeout(1200)
def test_what_executors_lack_is_told_in_a_line_each_before_the_first_epoch(
    cluster: Cluster, environment: Path, tmp_path: Path
) -> None:
    if cluster.other_user is None:
        pytest.skip("without another user the executors see the driver's directories")
    lake = f'connector = "files"\npath = "{tmp_path}/lake/{{topic}}"'
    done = submit(cluster, tmp_path, PIPELINE.format(name="apart", sink=lake), environment)
    said = done.stdout + done.stderr  # spark-submit hands on both as its own output
    assert done.returncode == 2, said[-3000:]
    assert "PEN-1051" in said
    assert f"{tmp_path} of sink" in said.replace("\n", " ")
    assert "Traceback" not in said


POLLED = """
connector_name = "{name}"
delivery = "exactly-once"
[processing]
max_epoch_bytes = 200_000
[source]
connector = "http_poll"
url = "{url}"
stream = "records"
pagination = {{ type = "offset", size = 1000 }}
[[routes]]
to = "/{name}/records"
[[schemas]]
topic = "/{name}/records"
schema_type = "json"
[sink]
{sink}
"""


@pytest.mark.timeout(1200)
def test_a_journal_that_the_workers_cannot_read_is_handed_to_them(
    cluster: Cluster, server: PostgresServer, tmp_path: Path
) -> None:
    if cluster.other_user is None:
        pytest.skip("without another user the executors see the driver's directories")

    def answer(asked: Asked) -> Says:
        at = int(asked.query["offset"])
        return 200, [{"id": id, "note": "x" * 100} for id in range(at, min(at + 1000, 10_000))]

    with receiving(answer) as api:
        text = POLLED.format(name="handed", url=api.url, sink=sink(server))
        home = tmp_path / "driver"
        home.mkdir()
        (home / "pipeline.toml").write_text(text)
        pack(tmp_path / "environment.tar.gz", Pipeline.from_toml(home / "pipeline.toml"))
        done = submit(cluster, home, text, tmp_path / "environment.tar.gz")
    assert done.returncode == 0, done.stderr[-3000:] + cluster.log
    journal = next((home / "state").rglob("*.index")).parent
    user = cluster.other_user
    seen = subprocess.run(["ls", journal], user=user.pw_uid, group=user.pw_gid, extra_groups=[], capture_output=True)
    assert seen.returncode != 0, "the workers' user sees nothing of it"
    with psycopg.connect(server.dsn) as connection:
        rows = connection.execute("SELECT id FROM handed.records ORDER BY id").fetchall()
    assert [row[0] for row in rows] == list(range(10_000))
