"""
Spark as a reader of lake tables: the newest one that Delta and Iceberg have jars for, with their own code and none of ours.

`python -m penstock.testing.spark_reader` installs it once into the user's cache (500 MB), by pip and Maven.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock.testing.s3 import cache

SPARK, PY4J = "4.1.1", "0.10.9.9"
DELTA, ICEBERG = "4.4.0", "1.12.0"
JARS = (
    f"io.delta:delta-spark_4.1_2.13:{DELTA}",
    f"org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:{ICEBERG}",
    "org.xerial:sqlite-jdbc:3.46.1.3",
)

_SCRIPT = """
import json, sys
from pyspark.sql import SparkSession
asked = json.loads(sys.stdin.read())
session = SparkSession.builder.master("local[1]").appName("reader")
for name, value in asked["settings"].items():
    session = session.config(name, value)
session = session.getOrCreate()
found = [[row.asDict() for row in session.sql(query).collect()] for query in asked["queries"]]
print("ANSWER " + json.dumps(found, default=str))
"""


def home() -> Path:
    return cache() / f"spark-reader-{SPARK}-{DELTA}-{ICEBERG}"


def is_installed() -> bool:
    return home().is_dir()


def install() -> None:
    """Fetch it, unless it is there; a call that is broken off leaves nothing that looks installed."""
    maven = shutil.which("mvn")
    if is_installed():
        return
    if maven is None:
        raise RuntimeError("Maven is missing: it fetches the jars of Delta and Iceberg")
    cache().mkdir(parents=True, exist_ok=True)
    free = {name: value for name, value in os.environ.items() if "CONSTRAINT" not in name}
    with tempfile.TemporaryDirectory(dir=cache()) as temporary:
        made = Path(temporary, "made")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        wanted = [f"pyspark=={SPARK}", f"py4j=={PY4J}"]
        subprocess.run([*pip, "--target", str(made), *wanted], check=True, env=free)
        Path(temporary, "pom.xml").write_text(_pom())
        copy = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
        command = [maven, "-q", "-B", copy, f"-DoutputDirectory={made}/jars", f"-Dmaven.repo.local={temporary}/m2"]
        subprocess.run(command, check=True, cwd=temporary)
        made.rename(home())


def _pom() -> str:
    """A project that needs the jars, and leaves Spark and Hadoop, which are there, out."""
    one = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>{}</dependency>"
    out = "".join(
        f"<exclusion><groupId>{group}</groupId><artifactId>*</artifactId></exclusion>"
        for group in ("org.apache.spark", "org.apache.hadoop", "org.scala-lang")
    )
    needed = "".join(one.format(*jar.split(":"), f"<exclusions>{out}</exclusions>") for jar in JARS)
    own = "<groupId>penstock</groupId><artifactId>reader</artifactId><version>1</version>"
    return f"<project><modelVersion>4.0.0</modelVersion>{own}<dependencies>{needed}</dependencies></project>"


def rows(queries: list[str], warehouse: Path) -> list[list[dict[str, Any]]]:
    """
    The rows of each query, by a process of its own. Delta tables are named by their path, delta.`/path`; Iceberg tables by the
    catalog `files` of the SQLite file `catalog.db` in `warehouse`.
    """
    jars = ",".join(str(each) for each in sorted((home() / "jars").glob("*.jar")))
    extensions = (
        "io.delta.sql.DeltaSparkSessionExtension,org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
    )
    settings = {
        "spark.jars": jars,
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.extensions": extensions,
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.catalog.files": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.files.type": "jdbc",
        "spark.sql.catalog.files.uri": f"jdbc:sqlite:{warehouse}/catalog.db",
        "spark.sql.catalog.files.warehouse": str(warehouse),
        "spark.sql.warehouse.dir": str(warehouse / "spark-warehouse"),
    }
    left_out = ("SPARK_SUBMIT_OPTS", "SPARK_HOME", "PYSPARK_SUBMIT_ARGS")
    free = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps({"settings": settings, "queries": queries}),
        capture_output=True,
        text=True,
        env={**free, "PYTHONPATH": str(home())},
        cwd=warehouse,
    )
    answer = next((line for line in done.stdout.splitlines() if line.startswith("ANSWER ")), None)
    if answer is None:
        raise RuntimeError(f"Spark gave no answer:\n{done.stderr[-4000:]}")
    found: list[list[dict[str, Any]]] = json.loads(answer.removeprefix("ANSWER "))
    return found


if __name__ == "__main__":
    if "--is-installed" in sys.argv:
        sys.exit(not is_installed())
    try:
        install()
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(f"Spark as a reader cannot be fetched: {error}")
