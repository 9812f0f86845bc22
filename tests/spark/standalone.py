"""A real cluster for tests: a master and two workers on 127.0.0.1, the workers as a user who cannot see the driver's files."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from pyspark.find_spark_home import _find_spark_home

from penstock.testing import spark_classes

CLASSES = "org.apache.spark.deploy"

LIGHT_EXECUTORS = f'--conf "spark.executor.extraJavaOptions={spark_classes.options()}" pyspark-shell'
"""For `PYSPARK_SUBMIT_ARGS`: executors that start as soon as the drivers of tests do."""


class Cluster:
    """`url` is its master. Each worker has a directory of its own, and nothing else to write to."""

    def __init__(self, workers: int = 2) -> None:
        self._count = workers
        self._processes: list[subprocess.Popen[bytes]] = []
        self.workers: list[subprocess.Popen[bytes]] = []
        self.home = Path(tempfile.mkdtemp(prefix="penstock-cluster-"))
        self.home.chmod(0o755)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"spark://127.0.0.1:{probe.getsockname()[1]}"

    @property
    def log(self) -> str:
        return "".join(file.read_text()[-3000:] for file in sorted(self.home.rglob("*.log")))

    @property
    def other_user(self) -> pwd.struct_passwd | None:
        """Another user who can run Spark; None: this one must do."""
        if os.geteuid() != 0:
            return None
        user = pwd.getpwnam("nobody")
        jars = Path(_find_spark_home(), "jars")
        seen = subprocess.run(["ls", jars], user=user.pw_uid, group=user.pw_gid, extra_groups=[], capture_output=True)
        return user if seen.returncode == 0 else None

    def __enter__(self) -> Cluster:
        host, port = self.url.removeprefix("spark://").split(":")
        self._start("master", f"{CLASSES}.master.Master", "--host", host, "--port", port, "--webui-port", "0")
        self._wait("I have been elected leader")
        for number in range(self._count):
            self.workers.append(self.start_worker(number))
        self._wait("Registering worker", self._count)
        return self

    def __exit__(self, *exc: Any) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        shutil.rmtree(self.home, ignore_errors=True)

    def start_worker(self, number: int) -> subprocess.Popen[bytes]:
        options = ("--cores", "1", "--memory", "1g", "--webui-port", "0", "--host", "127.0.0.1")
        return self._start(f"worker-{number}", f"{CLASSES}.worker.Worker", *options, self.url)

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        own = self.home / name
        own.mkdir(exist_ok=True)
        spark, user = _find_spark_home(), self.other_user
        given: dict[str, Any] = {}
        if user is not None:
            os.chown(own, user.pw_uid, user.pw_gid)
            given = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        environment = {
            **{key: os.environ[key] for key in ("PATH", "JAVA_HOME", "LANG") if key in os.environ},
            "SPARK_HOME": spark,
            "SPARK_WORKER_DIR": str(own),
            "SPARK_LOCAL_DIRS": str(own),
            "SPARK_DAEMON_JAVA_OPTS": f"{spark_classes.options()} -Djava.io.tmpdir={own}",
            "SPARK_DAEMON_MEMORY": "256m",
            "TMPDIR": str(own),
            "HOME": str(own),
        }
        with open(self.home / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [f"{spark}/bin/spark-class", *command], cwd=own, env=environment, stdout=log, stderr=log, **given
            )
        self._processes.append(process)
        return process

    def _wait(self, text: str, times: int = 1) -> None:
        give_up = time.monotonic() + 120
        while (self.home / "master.log").read_text().count(text) < times:
            assert time.monotonic() < give_up, self.log
            time.sleep(0.1)
