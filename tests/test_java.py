from __future__ import annotations

from pathlib import Path

import pytest

from penstock.spark.java import Java, find_java, java_problem


def fake_java(home: Path, version: str, *, release: bool = True) -> None:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2026-01-01' >&2\n")
    java.chmod(0o755)
    if release:
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')


@pytest.mark.parametrize(
    ("version", "major"), [("1.8.0_392", 8), ("11.0.2", 11), ("17.0.15", 17), ("25", 25), ("21-ea", 21), ("", 0)]
)
def test_every_way_of_writing_a_version_is_understood(version, major):
    assert Java(Path("java"), version).major == major


@pytest.mark.parametrize("release", [True, False], ids=["told by its release file", "told by running it"])
def test_java_home_comes_before_the_path(monkeypatch, tmp_path, release):
    fake_java(tmp_path, "21.0.1", release=release)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_java() == Java(tmp_path / "bin" / "java", "21.0.1")
    assert java_problem() is None


def test_a_missing_java_is_a_setting_with_a_way_out(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = java_problem()
    assert problem.code == "PEN-1014"
    assert "JAVA_HOME" in problem.hint


def test_a_java_home_without_java_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert str(tmp_path) in java_problem().message


def test_an_old_java_is_refused_with_its_version(monkeypatch, tmp_path):
    fake_java(tmp_path, "11.0.20")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert "Java 11.0.20" in java_problem().message


def test_a_java_that_cannot_run_is_refused(monkeypatch, tmp_path):
    fake_java(tmp_path, "17", release=False)
    (tmp_path / "bin" / "java").write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert java_problem().code == "PEN-1014"


@pytest.mark.parametrize(
    ("submitted", "master"),
    [
        (None, "local[*]"),
        ("", "local[*]"),
        ("--master local[3] pyspark-shell", "local[3]"),
        ("--conf spark.master=local[4] pyspark-shell", "local[4]"),
        ("pyspark-shell", "local[*]"),
    ],
)
def test_the_master_is_the_one_that_was_submitted_or_this_machine(monkeypatch, tmp_path, submitted, master):
    from penstock.spark.session import chosen_master

    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    if submitted is not None:
        monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", submitted)
    assert chosen_master(None) == master
