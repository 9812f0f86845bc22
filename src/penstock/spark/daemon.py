"""
Forks the Python workers of Spark from a process that has imported what they need: a second less for each of them.

`-Dspark.python.daemon.module=penstock.spark.daemon` in `SPARK_SUBMIT_OPTS`, where workers find Penstock installed.
"""

from __future__ import annotations

import gc

import pyarrow as pa
from pyspark.daemon import manager

import penstock.runtime.task
import penstock.spark.tasks  # noqa: F401

if __name__ == "__main__":
    pa.array([0])  # Arrow's late imports
    gc.collect()
    gc.freeze()  # a worker's collections would copy every page of what is imported
    manager()
