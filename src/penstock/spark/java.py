"""Which Java Spark would start, and what to do when there is none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError, ConnectorError

LEAST = 17
"""The oldest Java that Spark 4 runs on."""


@dataclass(frozen=True)
class Java:
    """A Java that was found; the version is empty when it would not say."""

    path: Path
    version: str

    @property
    def major(self) -> int:
        numbers = [int(n) for n in re.findall(r"\d+", self.version)[:2]]
        if not numbers:
            return 0
        return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]  # 1.8.0 is Java 8


def find_java() -> Java | None:
    """The Java that Spark's launcher takes: `JAVA_HOME` first, then the path."""
    home = os.environ.get("JAVA_HOME")
    found = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if not found or not os.access(found, os.X_OK):
        return None
    return Java(Path(found), _version(Path(found)))


def java_problem() -> ConnectorError | None:
    """Why Spark cannot be started here, asked before it is; None when it can."""
    java = find_java()
    if java is None:
        home = os.environ.get("JAVA_HOME")
        what = f"JAVA_HOME is {home}, and there is no bin/java in it" if home else "there is no java on the path"
        return ConfigError(f"Java is missing: {what}", code="PEN-1014", hint=_install())
    if java.major < LEAST:
        version = f"is Java {java.version}" if java.version else "does not tell its version"
        return ConfigError(
            f"{java.path} {version}; Spark 4 needs Java {LEAST} or newer", code="PEN-1014", hint=_install()
        )
    return None


def _version(java: Path) -> str:
    # Every JDK since 9 says so in a file beside it; starting a JVM only to ask it takes a noticeable time.
    try:
        release = (java.resolve().parent.parent / "release").read_text()
    except OSError:
        release = ""
    told = re.search(r'^JAVA_VERSION="([^"]+)"', release, re.MULTILINE)
    if told:
        return told.group(1)
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    told = re.search(r'version "([^"]+)"', answer.stderr + answer.stdout)
    return told.group(1) if told else ""


def _install() -> str:
    if sys.platform == "darwin":
        return f"brew install openjdk@{LEAST}, or set JAVA_HOME to one that is there"
    tools = {
        "apt-get": "apt-get install default-jre-headless",
        "dnf": "dnf install java-21-openjdk-headless",
        "apk": "apk add openjdk21-jre-headless",
    }
    command = next((how for tool, how in tools.items() if shutil.which(tool)), None)
    if command is None:
        return f"install Java {LEAST} or newer, or set JAVA_HOME to one that is there"
    sudo = "" if os.geteuid() == 0 else "sudo "
    return f"{sudo}{command}, or set JAVA_HOME to one that is there"


if __name__ == "__main__":  # for the Makefile
    problem = java_problem()
    if problem:
        sys.exit(str(problem))
