"""Starts and ends Spark sessions."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

from penstock.durable import disk_errors
from penstock.errors import (
    FatalError,
)
from penstock.spark.failures import last_line

JVM_LOCK_WAIT_SECS = 30.0

_ARROW_OPTIONS = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"

_LIGHT = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:MetaspaceSize=256m"
"""
For a JVM that only hands out tasks: without Java's second compiler, which takes a second of CPU to make such code faster,
and without marking a heap that is hardly used, beside the tasks, each time that classes are loaded.
"""

_WORKER_MEMORY = {
    # The threads of a task hand their memory on to each other: with a heap for each, a worker holds 60 MiB more.
    "MALLOC_ARENA_MAX": "1",
    # What one batch has freed, the next one takes. Given back to the system in between, it is zeroed page by page each
    # time: a tenth of what a worker does.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}


def start_session(master: str | None, name: str, log: Path | None, plain: bool = False) -> Any:
    master = chosen_master(master)
    if master is not None and is_local(master):
        os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if master is not None and master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    settings = {
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
        # A task answers over a Unix socket 40 ms sooner than over loopback TCP, where its small writes wait for an ACK.
        "spark.python.unix.domain.socket.enabled": "true",
        **{f"spark.executorEnv.{name}": value for name, value in _WORKER_MEMORY.items()},
    }
    if "spark.ui.enabled" not in os.environ.get("PYSPARK_SUBMIT_ARGS", "") and "PYSPARK_GATEWAY_PORT" not in os.environ:
        # A second of the start, and a page without a password on every address, unless somebody asks for it.
        settings["spark.ui.enabled"] = "false"
    if master is not None and master.startswith("local["):
        # Arrow checks the bounds of every value that Spark writes into vectors which it has sized itself: a third of the
        # way from rows to Python. On a cluster these options are the operator's.
        settings["spark.driver.extraJavaOptions"] = f"{_ARROW_OPTIONS} {_LIGHT}" if plain else _ARROW_OPTIONS
    if master is not None:
        settings["spark.master"] = master
    settings["spark.app.name"] = name
    builder = SparkSession.builder
    for option, value in settings.items():
        builder = builder.config(option, value)
    try:
        _launch(settings, log)
        session = builder.getOrCreate()
    except Exception as error:
        raise FatalError(
            f"Spark did not start{f' with master {master}' if master else ''}: {last_line(str(error))}",
            code="PEN-5012",
            hint=f"its log is {log}" if log else "",
        ) from error
    session.sparkContext.setLogLevel("ERROR")
    # They would print the traces of connections that broke because the JVM was killed, which we say in a line.
    logging.getLogger().addFilter(_not_of_py4j)
    session.sparkContext._accumulatorServer.handle_error = lambda *_: None
    return session


def is_local(master: str) -> bool:
    """True if tasks run in processes of this machine that see all that the driver sees."""
    return master == "local" or master.startswith("local[")


def expected_cores(context: Any) -> int:
    """
    Cores that the settings ask for, whether their executors are there yet or not; 0 if they say nothing.

    With dynamic allocation and no bound it is twice of what there is: Spark asks for executors only while tasks wait.
    """
    if is_local(context.master):
        return 0
    conf = context._conf  # `getConf()` copies every setting over the gateway: 12 ms, several times an epoch

    def number(option: str) -> int:
        value = str(conf.get(option, "0"))
        return int(value) if value.isdigit() else 0

    cores = number("spark.executor.cores") or 1
    if conf.get("spark.dynamicAllocation.enabled", "false") != "true":
        return number("spark.executor.instances") * cores
    most = number("spark.dynamicAllocation.maxExecutors") * cores
    return min(most or 1 << 30, 2 * int(context.defaultParallelism))


def is_submitted() -> bool:
    """True under `spark-submit`: it has started the JVM, and this process is its child."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def chosen_master(master: str | None) -> str | None:
    """The master that was asked for, in Spark's own order; None: the JVM that `spark-submit` started knows it."""
    if master is not None:
        return master
    if is_submitted():
        return None
    submitted = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    for word, following in zip(submitted, [*submitted[1:], ""], strict=False):
        name, _, value = following.partition("=") if word in ("--conf", "-c") else word.partition("=")
        if word == "--master" or (name in ("--master", "spark.master") and value):
            return value or following
    return _default("spark.master") or "local[*]"


def _default(option: str) -> str | None:
    """What `spark-defaults.conf` says."""
    home = os.environ.get("SPARK_CONF_DIR") or os.path.join(os.environ.get("SPARK_HOME", ""), "conf")
    try:
        lines = Path(home, "spark-defaults.conf").read_text().splitlines()
    except OSError:
        return None
    pairs = (re.split(r"[\s=]+", line.strip(), maxsplit=1) for line in lines if not line.lstrip().startswith("#"))
    return next((pair[1].strip() for pair in pairs if len(pair) == 2 and pair[0] == option), None)


def _launch(settings: dict[str, str], log: Path | None) -> None:
    """
    Start the JVM with a log file for its stderr: its warnings would tear the progress view.

    It gets a process group of its own. A signal to ours, such as a scheduler's SIGTERM, must not end it in mid-epoch: it ends
    when this process does, since its standard input is a pipe from here.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if log is None or SparkContext._gateway is not None or is_submitted():
        return
    with disk_errors():
        log.parent.mkdir(parents=True, exist_ok=True)
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        conf = SparkConf().setAll(list(settings.items()))
        SparkContext._ensure_initialized(gateway=launch_gateway(conf, {"stderr": target, "process_group": 0}))
    finally:
        os.close(target)


def _not_of_py4j(record: logging.LogRecord) -> bool:
    return f"{os.sep}py4j{os.sep}" not in record.pathname


def end_session(session: Any) -> None:
    """End a session; one whose JVM was killed is forgotten, so that the next run in this process can start another."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a JVM that cannot be stopped because it is gone
            session.stop()
    except (Py4JError, ConnectionError):
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = None


def try_lock(channel: Any) -> Any:
    from py4j.protocol import Py4JJavaError

    try:
        return channel.tryLock()
    except Py4JJavaError:  # OverlappingFileLockException: another pipeline in this JVM holds it
        return None
