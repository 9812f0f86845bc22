"""The Python that the pages show runs as it stands, in a directory with a pipeline and some files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock import Pipeline
from penstock.connectors.files.sink import read_published

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "spark.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TOML = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)

PIPELINE = """
connector_name = "shown"
delivery = "exactly-once"

[source]
connector = "files"
path = "incoming"
settle_ms = 0

[sink]
connector = "files"
path = "lake/{topic}"
"""

SHOP = """
connector_name = "shop"

[source]
connector = "generator"
streams = ["orders"]
rows = 50

[sink]
connector = "files"
path = "lake/{topic}"

"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_modules: None) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "incoming").mkdir()
    for file in (ROOT / "examples" / "data").glob("*.jsonl"):
        (tmp_path / "incoming" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    for text in PYTHON:
        if named := re.match(r"# (\w+\.py)\b", text):
            (tmp_path / named[1]).write_text(text)
    return tmp_path


def test_the_examples_run_one_after_the_other(spark: Any, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"spark": spark}
    for text in PYTHON:
        exec(text, names)
    out = capsys.readouterr().out
    assert "1 12 12 0" in out, "the pipeline"
    assert re.search(r"\|\s*buy\|\s*4\|", out), "the DataFrame"
    assert spark.read.parquet(str(directory / "copy")).count() == 12, "the stream"
    assert out.splitlines()[-1] == "12", "what the sink wrote, as Spark sees it"


@pytest.mark.parametrize("route", TOML, ids=["sql", "state", "transform"])
def test_a_route_that_is_shown_shapes_its_rows(spark: Any, directory: Path, route: str) -> None:
    (directory / "shop.toml").write_text(SHOP + route)
    Pipeline.from_toml("shop.toml").run(spark=spark, drain=True)
    shaped = read_published(directory / "lake" / "shop" / "large_orders")
    if "streaming" in route:
        assert sum(shaped["orders"].to_pylist()) == 50
        return
    assert shaped.column_names == ["id", "name", "amount"]
    assert 0 < shaped.num_rows <= 50
    assert all(amount > 100 for amount in shaped["amount"].to_pylist())
