"""
The classes of Spark as the JVM keeps them in memory: with them a JVM of a test starts with half the work.

`python -m penstock.testing.spark_classes` makes such an archive once (160 MB), in the user's cache, for the PySpark that it
finds. It belongs to one PySpark at one place and to one Java; without a fitting one the JVM only starts more slowly.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from penstock.spark.java import find_java

_SHORT = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For short runs, in which a third of the time would go into Java's second compiler, and for heaps that are hardly used."""

_WORK = """
import sys
from pathlib import Path
from penstock.spark.session import start_session

session = start_session("local[2]", "classes", Path(sys.argv[1]))
numbers = session.range(100).selectExpr("id", "id % 7 AS seven", "CAST(id AS STRING) AS text", "current_timestamp() AS at")
numbers.mapInArrow(lambda batches: batches, numbers.schema).createOrReplaceTempView("numbers")
query = "SELECT seven, count(*) AS n, max(text) AS most FROM numbers WHERE id > 3 GROUP BY seven ORDER BY seven"
session.createDataFrame(session.sql(query).toArrow()).repartition(2, "seven").write.format("noop").mode("append").save()
rows = session.readStream.format("rate").load().mapInArrow(lambda batches: batches, "timestamp timestamp, value bigint")
stream = rows.writeStream.foreachBatch(lambda rows, _: rows.count()).trigger(availableNow=True)
stream.option("checkpointLocation", sys.argv[2]).start().awaitTermination()
process = session.sparkContext._gateway.proc
session.stop()
process.stdin.close()
process.wait()
"""
"""Work of the kinds that tests do, so that its classes are there."""


def archive(pyspark: Path | None = None) -> Path | None:
    """Where the archive of a PySpark is kept, made or not; None: there is no PySpark, or no Java."""
    java = find_java()
    if pyspark is None:
        found = find_spec("pyspark")
        pyspark = Path(found.origin).parent if found is not None and found.origin else None
    if pyspark is None or java is None:
        return None
    cache = Path(os.environ.get("PENSTOCK_CACHE") or Path.home() / ".cache" / "penstock")
    which = f"{pyspark.resolve()} {(pyspark / 'version.py').stat().st_mtime_ns} {java.path.resolve()} {java.version}"
    return cache / f"spark-classes-{hashlib.sha256(which.encode()).hexdigest()[:16]}.jsa"


def options(pyspark: Path | None = None) -> str:
    """Java options for the JVM of a test: what goes to `SPARK_SUBMIT_OPTS`."""
    made = archive(pyspark)
    # The JVM would print to the standard output of a test that the archive does not fit.
    return f"{_SHORT} -XX:SharedArchiveFile={made} -Xlog:disable" if made and made.exists() else _SHORT


def install() -> None:
    """Make the archive, unless it is there; a call that is broken off leaves nothing that looks made."""
    target = archive()
    if target is None or target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        made = Path(temporary, "made.jsa")
        dumping = f"{_SHORT} -XX:ArchiveClassesAtExit={made} -Xlog:disable"
        environment = {**os.environ, "SPARK_SUBMIT_OPTS": dumping, "TMPDIR": temporary}
        command = [sys.executable, "-c", _WORK, f"{temporary}/spark.log", f"{temporary}/checkpoint"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        with contextlib.suppress(FileNotFoundError):  # a JVM without such archives
            made.rename(target)


if __name__ == "__main__":
    if "--is-installed" in sys.argv:
        wanted = archive()
        sys.exit(0 if wanted is None or wanted.exists() else 1)
    install()
