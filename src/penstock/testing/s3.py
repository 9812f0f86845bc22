"""
S3 servers for tests, on free ports of 127.0.0.1: ministack, quick and in memory, and S3Proxy, which checks signatures.

`python -m penstock.testing.s3` installs them once into the user's cache: ministack by pip into an environment of its own
(90 MB), S3Proxy by Maven (55 MB).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path
from typing import Any, ClassVar, Self
from uuid import uuid4

from penstock.testing.apicurio import _java

MINISTACK = "1.5.33"
S3PROXY = "4.1.0"

KEY, SECRET = "penstock-tests", "not-a-secret"
"""Clients without keys would ask the address of instance metadata, so that tests always give some."""


def cache() -> Path:
    """Where servers are kept; `PENSTOCK_CACHE` names another directory than `~/.cache/penstock`."""
    return Path(os.environ.get("PENSTOCK_CACHE") or Path.home() / ".cache" / "penstock")


def ministack() -> Path:
    return cache() / f"ministack-{MINISTACK}" / "bin" / "ministack"


def s3proxy() -> Path:
    return cache() / f"s3proxy-{S3PROXY}.jar"


def is_installed() -> bool:
    return ministack().is_file() and s3proxy().is_file()


def install() -> None:
    """Fetch what is not there; a call that is broken off leaves nothing that looks installed."""
    install_ministack()
    if not s3proxy().is_file():
        fetch_jar(f"org.gaul:s3proxy:{S3PROXY}:jar:jar-with-dependencies", s3proxy())


def install_ministack() -> None:
    cache().mkdir(parents=True, exist_ok=True)
    if not ministack().is_file():
        environment = ministack().parent.parent
        shutil.rmtree(environment, ignore_errors=True)
        venv.create(environment, with_pip=True)
        # Our constraints are not its own: it wants older versions of some packages.
        free = {name: value for name, value in os.environ.items() if not name.endswith("_CONSTRAINT")}
        command = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", f"ministack=={MINISTACK}"]
        try:
            subprocess.run(command, check=True, env=free)
        except BaseException:
            shutil.rmtree(environment, ignore_errors=True)
            raise


def fetch_jar(artifact: str, target: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise RuntimeError(f"Maven is missing: it fetches {artifact}")
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        copy = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
        command = [maven, "-q", "-B", copy, f"-Dartifact={artifact}", f"-DoutputDirectory={temporary}/out"]
        subprocess.run([*command, f"-Dmaven.repo.local={temporary}/m2"], check=True, cwd=temporary)
        (jar,) = Path(temporary, "out").glob("*.jar")
        jar.rename(target)


class S3Server:
    """A server in a process of its own; `stop` and `start` are an outage. It keeps the address, and S3Proxy its objects."""

    name: ClassVar[str] = "ministack"

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._home = Path(tempfile.mkdtemp(prefix="penstock-s3-"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def options(self, **more: Any) -> dict[str, Any]:
        """`storage_options` for this server. The keys are in the environment, as `PENSTOCK_S3_KEY` and `…_SECRET`."""
        os.environ["PENSTOCK_S3_KEY"], os.environ["PENSTOCK_S3_SECRET"] = KEY, SECRET
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": {"env": "PENSTOCK_S3_KEY"},
            "secret_access_key": {"env": "PENSTOCK_S3_SECRET"},
            "metadata_endpoint": "http://127.0.0.1:1",
            **more,
        }

    def bucket(self, name: str = "") -> str:
        """Make a bucket, by default with a name of its own; gives its address."""
        name = name or f"b-{uuid4().hex[:12]}"
        self._make_bucket(name)
        return f"s3://{name}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        shutil.rmtree(self._home, ignore_errors=True)

    def start(self) -> None:
        with open(self._home / "log", "ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._home,
                env={**os.environ, **self._environment()},
                start_new_session=True,
            )
        deadline, pause = time.monotonic() + 180, threading.Event()
        while self._process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            pause.wait(0.05)
        text = (self._home / "log").read_text(errors="replace")[-2000:]
        self.__exit__()
        raise RuntimeError(f"{self.name} did not start:\n{text}")

    def stop(self) -> None:
        """Kill it, in the middle of whatever it does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(60)

    def _command(self) -> list[str]:
        return [str(ministack())]

    def _environment(self) -> dict[str, str]:
        return {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(self.port)}

    def _make_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=30):
            pass


class S3ProxyServer(S3Server):
    """S3Proxy over a directory. It refuses requests whose signature is not by the right secret."""

    name = "S3Proxy"

    def _command(self) -> list[str]:
        java = _java()
        assert java is not None, "Java is missing"
        (self._home / "data").mkdir(exist_ok=True)
        properties = {
            "s3proxy.authorization": "aws-v2-or-v4",
            "s3proxy.endpoint": self.endpoint,
            "s3proxy.identity": KEY,
            "s3proxy.credential": SECRET,
            "s3proxy.ignore-unknown-headers": "true",  # such as tokens of a role
            "jclouds.provider": "filesystem-nio2",
            "jclouds.filesystem.basedir": str(self._home / "data"),
        }
        text = "".join(f"{name}={value}\n" for name, value in properties.items())
        (self._home / "s3proxy.conf").write_text(text)
        options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        return [java, *options, "-jar", str(s3proxy()), "--properties", str(self._home / "s3proxy.conf")]

    def _environment(self) -> dict[str, str]:
        return {}

    def _make_bucket(self, name: str) -> None:
        (self._home / "data" / name).mkdir()  # a directory is a bucket


if __name__ == "__main__":
    if "--is-installed" in sys.argv:
        sys.exit(not is_installed())
    try:
        install()
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(f"the S3 servers for tests cannot be fetched: {error}")
