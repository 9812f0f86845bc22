"""
A Hive metastore for tests, version 3, over a database in memory, on a free port of 127.0.0.1.

`python -m penstock.testing.hive` fetches it once into the user's cache, by Maven (90 MB). It needs a Java compiler. Version 4 has
dropped the calls that pyiceberg makes (`get_table`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

from penstock.testing.apicurio import _java
from penstock.testing.s3 import S3Server, cache

HIVE, HADOOP, DERBY = "3.1.3", "3.3.6", "10.14.2.0"
_JARS = (
    f"org.apache.hive:hive-standalone-metastore:{HIVE}",
    f"org.apache.hadoop:hadoop-common:{HADOOP}",
    f"org.apache.hadoop:hadoop-mapreduce-client-core:{HADOOP}",
    f"org.apache.derby:derby:{DERBY}",
)
_OPENED = ("lang", "util", "net", "nio", "util.concurrent")

_SETTINGS = {
    "javax.jdo.option.ConnectionURL": "jdbc:derby:memory:metastore;create=true",
    "javax.jdo.option.ConnectionDriverName": "org.apache.derby.jdbc.EmbeddedDriver",
    "datanucleus.schema.autoCreateAll": "true",
    "metastore.schema.verification": "false",
    "metastore.thrift.bind.host": "127.0.0.1",
    "metastore.client.capability.check": "false",
    # What else these name is in jars of Hive itself.
    "metastore.expression.proxy": "org.apache.hadoop.hive.metastore.DefaultPartitionExpressionProxy",
    "metastore.task.threads.always": "org.apache.hadoop.hive.metastore.events.EventCleanerTask",
}

_MAIN = """
import org.apache.hadoop.hive.metastore.HiveMetaStore;
import org.apache.hadoop.hive.metastore.conf.MetastoreConf;
import org.apache.hadoop.hive.metastore.txn.TxnDbUtil;

public class Started {
  public static void main(String[] given) throws Throwable {
    TxnDbUtil.prepDb(MetastoreConf.newMetastoreConf());  // the tables of locks, which are not made by themselves
    HiveMetaStore.main(given);
  }
}
"""


def home() -> Path:
    return cache() / f"hive-metastore-{HIVE}"


def is_installed() -> bool:
    return home().is_dir() and _java() is not None and shutil.which("javac") is not None


def install() -> None:
    """Fetch it, unless it is there; a call that is broken off leaves nothing that looks installed."""
    maven = shutil.which("mvn")
    if maven is None or shutil.which("javac") is None:
        raise RuntimeError("Maven and a Java compiler are needed: one fetches Hive's metastore, the other starts it")
    if home().is_dir():
        return
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache()) as temporary:
        Path(temporary, "pom.xml").write_text(_pom())
        copy = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
        command = [maven, "-q", "-B", copy, f"-DoutputDirectory={temporary}/jars", f"-Dmaven.repo.local={temporary}/m2"]
        subprocess.run(command, check=True, cwd=temporary)
        Path(temporary, "jars").rename(home())


def _pom() -> str:
    """A project that needs the jars."""
    one = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
    needed = "".join(one.format(*jar.split(":")) for jar in _JARS)
    own = "<groupId>penstock</groupId><artifactId>metastore</artifactId><version>1</version>"
    return f"<project><modelVersion>4.0.0</modelVersion>{own}<dependencies>{needed}</dependencies></project>"


class HiveServer(S3Server):
    """A metastore, empty at each start; it is a server like the others, and holds no objects."""

    name: ClassVar[str] = "Hive's metastore"

    @property
    def uri(self) -> str:
        return f"thrift://127.0.0.1:{self.port}"

    def _command(self) -> list[str]:
        settings = "".join(
            f"<property><name>{name}</name><value>{value}</value></property>" for name, value in self._all()
        )
        (self._home / "metastore-site.xml").write_text(f"<configuration>{settings}</configuration>")
        (self._home / "Started.java").write_text(_MAIN)
        opened = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in _OPENED]
        java, path = _java() or "java", os.pathsep.join([str(self._home), f"{home()}/*"])
        small = ["-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Dderby.system.home={self._home}"]
        return [java, *small, *opened, "-cp", path, str(self._home / "Started.java"), "-p", str(self.port)]

    def _all(self) -> list[tuple[str, str]]:
        return [*_SETTINGS.items(), ("metastore.warehouse.dir", str(self._home / "warehouse"))]

    def _environment(self) -> dict[str, str]:
        return {}


if __name__ == "__main__":
    if "--is-installed" in sys.argv:
        sys.exit(not is_installed())
    try:
        install()
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(f"Hive's metastore {HIVE} cannot be fetched: {error}")
