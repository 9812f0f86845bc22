from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock.config import Config, FilePath, Secret, beside
from penstock.errors import ConfigError


class Paths(Config):
    one: Path = Path("a")
    many: tuple[Path, ...] = (Path("b"), Path("/c"))
    template: FilePath = "lake/{topic}"
    templates: list[FilePath] = []  # noqa: RUF012 - pydantic copies it
    text: str = "stays"


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("lake/{topic}", "/base/lake/{topic}"),
        ("./in/**/*.jsonl", "/base/in/**/*.jsonl"),
        ("../up", "/base/../up"),
        ("/abs", "/abs"),
        ("s3://bucket/{topic}", "s3://bucket/{topic}"),
    ],
)
def test_a_path_is_found_beside_the_file(path, found):
    assert beside(Path("/base"), path) == found


def test_home_is_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert beside(Path("/base"), "~/data") == "/home/someone/data"


def test_given_and_default_paths_are_resolved_and_other_text_is_not():
    found = Paths.model_validate({"templates": ["x", "s3://y"]}, context={"base": Path("/base")})
    assert found.one == Path("/base/a")
    assert found.many == (Path("/base/b"), Path("/c"))
    assert found.template == "/base/lake/{topic}"
    assert found.templates == ["/base/x", "s3://y"]
    assert found.text == "stays"


def test_without_a_file_paths_stay_as_they_are():
    assert Paths() == Paths.model_validate({})
    assert Paths().one == Path("a")
    assert Paths().template == "lake/{topic}"


def test_a_secret_is_read_from_the_environment_when_it_is_used(monkeypatch):
    secret = Secret(env="PENSTOCK_TEST_SECRET")
    with pytest.raises(ConfigError, match=r"PEN-1005 .*PENSTOCK_TEST_SECRET is not set"):
        secret.reveal()
    monkeypatch.setenv("PENSTOCK_TEST_SECRET", "hunter2")
    assert secret.reveal() == "hunter2"
    assert "hunter2" not in f"{secret} {secret!r} {secret.model_dump_json()}"


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"PEN-1005 cannot read the secret file .*nothing"):
        Secret(file=tmp_path / "nothing").reveal()
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"PEN-1005 .* is not UTF-8"):
        Secret(file=tmp_path / "bytes").reveal()


@pytest.mark.parametrize("given", ["hunter2", ["hunter2"], {}, {"env": "A", "file": "b"}, {"text": "hunter2"}])
def test_what_is_no_reference_is_refused_without_being_printed(given):
    with pytest.raises(ValidationError) as caught:
        Secret.model_validate(given)
    assert "hunter2" not in str(caught.value)
