"""`check` on a cluster: one task reveals every secret and tries the store."""

import os
import subprocess
import sys

import pytest

from penstock import store
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.spark.rehearsal import rehearse


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_task_writes_and_deletes_a_probe(spark, s3, tmp_path, kind):
    bucket = s3.bucket()
    given = {"path": f"{bucket}/{{topic}}", "storage_options": s3.options()}
    catalog = f"sqlite:///{tmp_path}/catalog.db"
    sink = (
        Delta(DeltaConfig(**given))
        if kind == "delta"
        else Iceberg(IcebergConfig(**given, mode="append", catalog_uri=catalog))
    )
    found = rehearse(spark.sparkContext, {"sink lake": sink})
    assert [each.ok for each in found] == [True, True]
    assert "can be written" in found[0].what
    assert list(store.listed(store.at(bucket, sink.config.storage_options))) == []


def test_a_secret_that_only_the_driver_has_is_named(spark, s3, monkeypatch):
    given = s3.options(secret_access_key={"env": "ONLY_ON_THE_DRIVER"})
    sink = Delta(DeltaConfig(path="s3://no-such-bucket/{topic}", storage_options=given))
    spark.range(1).rdd.map(str).collect()  # workers are there, and take no more variables
    monkeypatch.setenv("ONLY_ON_THE_DRIVER", "1")
    (finding,) = rehearse(spark.sparkContext, {"sink lake": sink})
    assert not finding.ok
    assert "ONLY_ON_THE_DRIVER" in finding.what
    assert finding.what.startswith("in a task, sink lake: PEN-")


PIPELINE = """
connector_name = "probed"
[source]
connector = "generator"
rows = 10
[[sinks]]
connector = "delta"
path = "{bucket}/{{topic}}"
[sinks.storage_options]
endpoint = "{endpoint}"
region = "us-east-1"
access_key_id = {{ env = "PENSTOCK_S3_KEY" }}
secret_access_key = {{ env = "PENSTOCK_S3_SECRET" }}
metadata_endpoint = "http://127.0.0.1:1"
"""


@pytest.mark.soak
def test_check_runs_the_task_on_executors(s3, tmp_path):
    file = tmp_path / "pipeline.toml"
    file.write_text(PIPELINE.format(bucket=s3.bucket(), endpoint=s3.endpoint))
    command = [sys.executable, "-m", "penstock", "check", str(file), "--master", "local-cluster[1,1,1024]"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in a task, sink delta: s3://" in done.stdout
    assert "in a task, source generator: secrets are there" in done.stdout
