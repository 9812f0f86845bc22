"""
A real schema registry for tests: Apicurio, in memory, with Confluent's API, on a free port of 127.0.0.1.

`python -m penstock.testing.apicurio` fetches it once, by Maven, into the user's cache (142 MB).
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

VERSION = "2.6.13.Final"
"""The last line that runs on Java 17."""


def home() -> Path:
    """Where it is kept; `PENSTOCK_CACHE` names another directory than `~/.cache/penstock`."""
    return Path(os.environ.get("PENSTOCK_CACHE") or Path.home() / ".cache" / "penstock") / f"apicurio-{VERSION}"


def is_installed() -> bool:
    return (home() / "lib").is_dir() and _java() is not None


def install() -> None:
    """Fetch and unpack it, unless it is there; a call that is broken off leaves nothing that looks installed."""
    if home().is_dir():
        return
    maven = shutil.which("mvn")
    if maven is None:
        raise RuntimeError("Maven is missing: it fetches Apicurio")
    home().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home().parent) as temporary:
        artifact = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
        copy = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
        command = [maven, "-q", "-B", copy, f"-Dartifact={artifact}", f"-DoutputDirectory={temporary}"]
        # The archive is of no use in Maven's own repository: that one is thrown away as well.
        subprocess.run([*command, f"-Dmaven.repo.local={temporary}/m2"], check=True, cwd=temporary)
        (archive,) = Path(temporary).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(Path(temporary, "unpacked"), filter="data")
        Path(temporary, "unpacked").rename(home())


class ApicurioServer:
    """One server; empty at each start. With a certificate and its key it speaks TLS; `settings` are its own, `name=value`."""

    def __init__(self, certificate: tuple[Path, Path] | None = None, settings: Sequence[str] = ()) -> None:
        self._settings = [f"-D{each}" for each in settings]
        self._is_secure = certificate is not None
        if certificate is not None:
            files = zip(("files", "key-files"), certificate, strict=True)
            self._settings += [f"-Dquarkus.http.ssl.certificate.{name}={file}" for name, file in files]
            self._settings.append("-Dquarkus.http.insecure-requests=disabled")

    def __enter__(self) -> ApicurioServer:
        java = _java()
        assert java is not None, "Java is missing"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self._home = Path(tempfile.mkdtemp(prefix="penstock-apicurio-"))
        jars = [*home().glob("*.jar"), home() / "lib" / "*"]
        options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Djava.io.tmpdir={self._home}"]
        port = f"-Dquarkus.http.{'ssl-' if self._is_secure else ''}port={self._port}"
        address = ["-Dquarkus.http.host=127.0.0.1", port, *self._settings]
        with open(self._home / "log", "ab") as log:
            self._process = subprocess.Popen(
                [java, *options, *address, "-cp", os.pathsep.join(map(str, jars)), "io.quarkus.runner.GeneratedMain"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._home,
                start_new_session=True,
            )
        if not self._wait_ready():
            text = (self._home / "log").read_text(errors="replace")[-2000:]
            self.__exit__()
            raise RuntimeError(f"Apicurio {VERSION} did not start:\n{text}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait(60)
        shutil.rmtree(self._home, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"http{'s' if self._is_secure else ''}://127.0.0.1:{self._port}/apis/ccompat/v7"

    def _wait_ready(self) -> bool:
        deadline, pause = time.monotonic() + 180, threading.Event()
        anyone = ssl.create_default_context()
        anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/subjects", timeout=10, context=anyone):
                    return True
            except urllib.error.HTTPError:  # it asks who we are
                return True
            except OSError:
                pause.wait(0.1)
        return False


def _java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=os.path.join(home, "bin") if home else None)


if __name__ == "__main__":
    if "--is-installed" in sys.argv:
        sys.exit(not is_installed())
    try:
        install()
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(f"Apicurio {VERSION} cannot be fetched: {error}")
