"""Programs in Java beside the tests, for what only Java's own clients can show. Maven fetches what they need, once."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.testing import apicurio


def program(source: Path, needed: Sequence[str], into: Path) -> list[str]:
    """The command that runs a program, compiled with the jars of `needed` (`group:name:version`) and all that they need."""
    jars = _fetched(source.stem.lower(), needed)
    subprocess.run(["javac", "-d", str(into), "-cp", f"{jars}/*", str(source)], check=True, timeout=120)
    return ["java", "-Dfile.encoding=UTF-8", "-cp", f"{into}:{jars}/*", source.stem]


def _fetched(name: str, needed: Sequence[str]) -> Path:
    versions = "-".join(dict.fromkeys(each.split(":")[2] for each in needed))
    place = apicurio.home().parent / f"java-{name}-{versions}"
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
        parts = (each.split(":") for each in needed)
        listed = "".join(
            f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version></dependency>"
            for group, name, version in parts
        )
        Path(temporary, "pom.xml").write_text(
            "<project><modelVersion>4.0.0</modelVersion><groupId>penstock</groupId><artifactId>tests</artifactId>"
            f"<version>1</version><dependencies>{listed}</dependencies></project>"
        )
        copy = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
        own = [f"-DoutputDirectory={temporary}/lib", f"-Dmaven.repo.local={temporary}/m2", "-DincludeScope=runtime"]
        subprocess.run(["mvn", "-q", "-B", copy, *own], check=True, cwd=temporary, timeout=280)
        Path(temporary, "lib").rename(place)
    return place
