"""
A real Kafka broker for tests, or several: each in a temporary directory, on free ports of 127.0.0.1, gone afterwards.

`python -m penstock.testing.kafka` fetches it once, by the Ivy that is inside PySpark, into the user's cache (20 MB).
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

VERSION = "4.3.1"

_KAFKA = [
    "kafka_2.13",
    "kafka-clients",
    "kafka-metadata",
    "kafka-server",
    "kafka-server-common",
    "kafka-storage",
    "kafka-storage-api",
    "kafka-raft",
    "kafka-coordinator-common",
    "kafka-group-coordinator",
    "kafka-group-coordinator-api",
    "kafka-transaction-coordinator",
    "kafka-share-coordinator",
    "kafka-tools",
    "kafka-tools-api",
]
_OTHERS = [
    "com.yammer.metrics:metrics-core:2.2.0",
    "net.sf.jopt-simple:jopt-simple:5.0.4",
    "org.hdrhistogram:HdrHistogram:2.2.2",
    "org.pcollections:pcollections:4.0.2",
    "com.typesafe.scala-logging:scala-logging_2.13:3.9.6",
    "commons-validator:commons-validator:1.10.1",
    "com.google.re2j:re2j:1.8",
    "net.sourceforge.argparse4j:argparse4j:0.7.0",
]
_OF_PYSPARK = [
    "scala-library",
    "jackson-core",
    "jackson-databind",
    "jackson-annotations",
    "jackson-dataformat-yaml",
    "snakeyaml",
    "log4j-api",
    "log4j-core",
    "log4j-slf4j2-impl",
    "slf4j-api",
    "zstd-jni",
    "lz4-java",
    "snappy-java",
]
"""Jars that PySpark has already; the versions are its own."""

_OPTIONS = ["-Xms64m", "-Xmx320m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]

_LOG = """
<Configuration><Appenders><Console name="out"><PatternLayout pattern="%d %p %m (%c{1})%n%throwable{short}"/></Console></Appenders>
<Loggers><Root level="warn"><AppenderRef ref="out"/></Root></Loggers></Configuration>
"""

SETTINGS: Mapping[str, str] = {
    "node.id": "1",
    "process.roles": "broker,controller",
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "false",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.dedupe.buffer.size": "2097152",  # by default 128 MB of the heap
    "log.retention.check.interval.ms": "500",
    "log.cleaner.backoff.ms": "500",
    "controlled.shutdown.enable": "false",  # one node has nobody to hand its partitions to
}
"""What a test's broker differs in from the defaults; `settings` of the server override it."""

SOON_BACK: Mapping[str, str] = {"broker.session.timeout.ms": "2000", "broker.heartbeat.interval.ms": "300"}
"""For brokers that tests kill: else the controller refuses a new one for 9 s, until the session of the killed one ends."""

_WATCH = """
cat
pid=$(cat "$1/pid") && grep -qzF "$1" "/proc/$pid/cmdline" && kill -KILL "$pid"
rm -rf "$1"
"""
"""Waits until its starter is gone, however it went, and takes the broker with it."""


def home() -> Path:
    """Where it is kept; `PENSTOCK_CACHE` names another directory than `~/.cache/penstock`."""
    return Path(os.environ.get("PENSTOCK_CACHE") or Path.home() / ".cache" / "penstock") / f"kafka-{VERSION}"


def is_installed() -> bool:
    return (home() / "template").is_dir() and _java() is not None


def install() -> None:
    """Fetch it and make what lets it start soon; a call that is broken off leaves nothing that looks installed."""
    if home().is_dir():
        return
    home().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home().parent) as temporary:
        whole = Path(temporary, "whole")
        _fetch_jars(Path(temporary), whole / "lib")
        (whole / "log4j2.xml").write_text(_LOG)
        _make_template(Path(temporary), whole)
        whole.rename(home())
    _make_archive()


class KafkaServer:
    """
    `with KafkaServer() as server: AdminClient({"bootstrap.servers": server.bootstrap})`.

    `listeners` names the protocols that it also speaks beside PLAINTEXT (`SASL_PLAINTEXT`, `SSL`, `SASL_SSL`, or another name
    for one of them: `OTHER:SSL`), each on a port of its own; their details go to `settings`.
    """

    def __init__(self, *, listeners: Iterable[str] = (), settings: Mapping[str, str] | None = None) -> None:
        self.settings = {**SETTINGS, **(settings or {})}
        named = (each.partition(":") for each in ("PLAINTEXT", "CONTROLLER:PLAINTEXT", *listeners))
        self._protocols = {name: protocol or name for name, _, protocol in named}
        self.ports = dict.fromkeys(self._protocols, 0)
        self._home: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        return self.address("PLAINTEXT")

    def address(self, listener: str) -> str:
        """What a client gives as `bootstrap.servers` to reach a listener."""
        return f"127.0.0.1:{self.ports[listener]}"

    @property
    def log(self) -> str:
        return (self._place / "log").read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def _place(self) -> Path:
        assert self._home is not None, "the broker was never started"
        return self._home

    def __enter__(self) -> KafkaServer:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.running:
            self.stop("kill")
        if self._watch is not None:
            self._watch.kill()
            self._watch.wait(60)
            assert self._watch.stdin is not None
            self._watch.stdin.close()
            self._watch = None
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None

    def start(self) -> None:
        """Make the data directory if there is none yet, start, and wait until requests are answered."""
        if self._home is None:
            self._make()
        for _ in range(5):  # between choosing a port and listening on it another process may take it
            for name, port in self.ports.items():
                self.ports[name] = port or _free_port()
            self._write_settings()
            with open(self._place / "log", "ab") as log:
                self._process = subprocess.Popen(
                    _command(home(), "kafka.Kafka", str(self._place / "server.properties")),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._place,
                    start_new_session=True,
                )
            (self._place / "pid").write_text(str(self._process.pid))
            if self._wait_ready():
                return
            if self.running or "BindException" not in self.log:
                break
            self.ports = dict.fromkeys(self.ports, 0)
        raise RuntimeError(f"Kafka {VERSION} did not start:\n{self.log[-3000:]}")

    def stop(self, mode: Literal["clean", "kill"] = "clean") -> None:
        """`clean` shuts down, `kill` is a SIGKILL."""
        assert self._process is not None, "the broker is not running"
        self._process.send_signal(signal.SIGTERM if mode == "clean" else signal.SIGKILL)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)
        self._process = None

    def kill(self) -> None:
        """SIGKILL."""
        self.stop("kill")

    def restart(self, mode: Literal["clean", "kill"] = "clean") -> None:
        """Stop and start again, on the same ports."""
        self.stop(mode)
        self.start()

    def tool(self, main: str, *arguments: str, input: str = "") -> str:
        """What one of Kafka's own tools prints: `server.tool("org.apache.kafka.tools.TransactionsCommand", …)`."""
        done = subprocess.run(
            _command(home(), main, *arguments), input=input, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{main} failed:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def _make(self) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="penstock-kafka-"))
        shutil.copytree(home() / "template", self._home / "data")
        if self.settings["node.id"] != "1":
            ids = self._home / "data" / "meta.properties"
            directory = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
            text = ids.read_text().replace("node.id=1", f"node.id={self.settings['node.id']}")
            ids.write_text(re.sub(r"directory\.id=.*", f"directory.id={directory}", text))
        self._watch = subprocess.Popen(
            ["sh", "-c", _WATCH, "sh", self._home],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _write_settings(self) -> None:
        addresses = ",".join(f"{name}://127.0.0.1:{port}" for name, port in self.ports.items())
        public = ",".join(each for each in addresses.split(",") if not each.startswith("CONTROLLER"))
        protocols = ",".join(f"{name}:{protocol}" for name, protocol in self._protocols.items())
        own = {
            "log.dirs": str(self._place / "data"),
            "listeners": addresses,
            "advertised.listeners": public,
            "listener.security.protocol.map": protocols,
            "inter.broker.listener.name": "PLAINTEXT",
            "controller.quorum.voters": f"1@127.0.0.1:{self.ports['CONTROLLER']}",
        }
        text = "".join(f"{name}={value}\n" for name, value in {**own, **self.settings}.items())
        (self._place / "server.properties").write_text(text)

    def _wait_ready(self) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        deadline, pause = time.monotonic() + 180, threading.Event()
        quiet = {"bootstrap.servers": self.bootstrap, "log_level": 0, "reconnect.backoff.max.ms": 100}
        client = AdminClient(quiet)
        while self.running and time.monotonic() < deadline:
            try:
                if client.list_topics(timeout=1).brokers:
                    return True
            except KafkaException:
                pause.wait(0.05)
        return False


class KafkaCluster:
    """
    Several brokers, each of which may lead: `with KafkaCluster() as cluster: cluster.servers[0].kill()`.

    Topics have as many replicas as there are brokers, and all but one must have a record before it counts.
    """

    def __init__(self, count: int = 3, settings: Mapping[str, str] | None = None) -> None:
        ports = {str(number): _free_port() for number in range(1, count + 1)}
        most, least = str(count), str(max(1, count - 1))
        common = {
            "controller.quorum.voters": ",".join(f"{id}@127.0.0.1:{port}" for id, port in ports.items()),
            "default.replication.factor": most,
            "min.insync.replicas": least,
            "offsets.topic.replication.factor": most,
            "transaction.state.log.replication.factor": most,
            "transaction.state.log.min.isr": least,
            "share.coordinator.state.topic.replication.factor": most,
            "share.coordinator.state.topic.min.isr": least,
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            **(settings or {}),
        }
        self.servers = [KafkaServer(settings={**common, "node.id": id}) for id in ports]
        for server, port in zip(self.servers, ports.values(), strict=True):
            server.ports["CONTROLLER"] = port

    @property
    def bootstrap(self) -> str:
        return ",".join(server.bootstrap for server in self.servers)

    def __enter__(self) -> KafkaCluster:
        try:
            with ThreadPoolExecutor(len(self.servers)) as pool:  # each waits for most of the others
                for each in [pool.submit(server.start) for server in self.servers]:
                    each.result()
            self.wait_until_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        for server in self.servers:
            server.__exit__()

    def wait_until_all(self) -> None:
        """Wait until every broker is part of the cluster and every partition has all its replicas."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        client, pause = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0}), threading.Event()
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            try:
                found = client.list_topics(timeout=2)
            except KafkaException:
                continue
            partitions = [each for topic in found.topics.values() for each in topic.partitions.values()]
            if len(found.brokers) == len(self.servers) and all(len(p.isrs) == len(p.replicas) for p in partitions):
                return
            pause.wait(0.1)
        raise RuntimeError("not all brokers came back")


def _fetch_jars(temporary: Path, lib: Path) -> None:
    jars = fetch([f"org.apache.kafka:{name}:{VERSION}" for name in _KAFKA] + _OTHERS, temporary, lib)
    for name in _OF_PYSPARK:
        found = [jar for jar in jars.glob(f"{name}-*.jar") if jar.name[len(name) + 1].isdigit()]
        shutil.copy2(found[0], lib)


def fetch(wanted: Sequence[str], temporary: Path, lib: Path) -> Path:
    """Fetch jars (`group:name:version`), and nothing that they need, by PySpark's Ivy; gives the directory of PySpark's jars."""
    pyspark = find_spec("pyspark")
    java = _java()
    if pyspark is None or pyspark.origin is None or java is None:
        raise RuntimeError("PySpark and Java are needed: Ivy and some of the jars are PySpark's")
    jars = Path(pyspark.origin).parent / "jars"
    lines = [
        f'<dependency org="{org}" name="{name}" rev="{rev}" transitive="false" conf="*->master(*)"/>'
        for org, name, rev in (each.split(":") for each in wanted)
    ]
    (temporary / "ivy.xml").write_text(
        '<ivy-module version="2.0"><info organisation="penstock" module="kafka"/>'
        f"<dependencies>{''.join(lines)}</dependencies></ivy-module>"
    )
    (ivy,) = jars.glob("ivy-*.jar")
    command = [java, "-jar", str(ivy), "-cache", f"{temporary}/cache", "-ivy", f"{temporary}/ivy.xml", "-retrieve"]
    done = subprocess.run(
        [*command, f"{lib}/[artifact]-[revision].[ext]"], capture_output=True, text=True, check=False, cwd=temporary
    )
    missing = [name for name in wanted if not (lib / "{1}-{2}.jar".format(*name.split(":"))).exists()]
    if done.returncode or missing:
        raise RuntimeError(f"Ivy did not fetch {', '.join(missing)}:\n{done.stdout[-2000:]}{done.stderr[-1000:]}")
    return jars


def _make_template(temporary: Path, whole: Path) -> None:
    """A formatted data directory: two small files that hold the ids of cluster and node."""
    properties = temporary / "format.properties"
    own = {
        "log.dirs": str(whole / "template"),
        "listeners": "PLAINTEXT://127.0.0.1:1,CONTROLLER://127.0.0.1:2",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "controller.quorum.voters": "1@127.0.0.1:2",
    }
    properties.write_text("".join(f"{name}={value}\n" for name, value in {**SETTINGS, **own}.items()))
    command = _command(
        whole, "kafka.tools.StorageTool", "format", "-t", "pEnStOcKpEnStOcKpEnStQ", "-c", str(properties)
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"Kafka's storage cannot be formatted:\n{done.stdout}{done.stderr}")


def _make_archive() -> None:
    """The classes of a broker that has served: with them it starts in half the time."""
    made = home() / f"{os.getpid()}.jsa"
    with KafkaServer() as server:
        server.stop()
        options = os.environ.get("JDK_JAVA_OPTIONS", "")
        os.environ["JDK_JAVA_OPTIONS"] = f"{options} -XX:ArchiveClassesAtExit={made}"
        try:
            server.start()
            server.stop()
        finally:
            os.environ["JDK_JAVA_OPTIONS"] = options
    if made.exists():  # without it, it only starts slowly
        made.rename(home() / "kafka.jsa")


def _command(place: Path, main: str, *arguments: str) -> list[str]:
    java = _java()
    assert java is not None, "Java is missing"
    archive = place / "kafka.jsa"
    archived = [f"-XX:SharedArchiveFile={archive}", "-Xshare:auto"] if archive.exists() else []
    # Named one by one: an archive of classes is of one very class path.
    jars = os.pathsep.join(str(jar) for jar in sorted((place / "lib").glob("*.jar")))
    log = f"-Dlog4j2.configurationFile={place / 'log4j2.xml'}"
    return [java, *_OPTIONS, *archived, log, "-cp", jars, main, *arguments]


def _java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=os.path.join(home, "bin") if home else None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    if "--is-installed" in sys.argv:
        sys.exit(not is_installed())
    try:
        install()
    except (OSError, RuntimeError) as error:
        sys.exit(f"Kafka {VERSION} cannot be fetched: {error}")
