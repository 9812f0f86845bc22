"""The connector of `docs/writing-a-connector.md`: as short as the page says, and it passes the kit."""

import inspect
import re
import sys
from pathlib import Path
from string import Template

import pytest

from penstock.errors import DataError
from penstock.source import ENVELOPE_SCHEMA, PollingSource, Sender
from penstock.testing import SourceContract

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from jsonl_dir import JsonlDir, JsonlDirConfig  # noqa: E402 - it lies beside the tests, as a stranger's would


class TestJsonlDir(SourceContract):
    @pytest.fixture
    def source(self, tmp_path):
        for number in range(5):
            put(tmp_path, number)
        return JsonlDir(JsonlDirConfig(path=tmp_path, columns={"id": "int64", "note": "string"}, max_files_per_epoch=2))

    @pytest.fixture
    def expected(self):
        return [{"id": id, "note": f"note {id}"} for id in range(15)]

    @pytest.fixture
    def more(self, tmp_path):
        return lambda: put(tmp_path, 5)

    @pytest.fixture
    def wrong(self, tmp_path):
        return JsonlDir(JsonlDirConfig(path=tmp_path / "nowhere", columns={}))


def put(directory, number):
    ids = range(3 * number, 3 * number + 3)
    aside = directory / "coming"
    aside.write_text("".join(f'{{"id": {id}, "note": "note {id}", "more": true}}\n' for id in ids))
    aside.rename(directory / f"{number:04d}.jsonl")


@pytest.mark.parametrize("text", ['{"id": "one"}\n', '{"id": 1', "[]\n"])
def test_a_file_that_cannot_be_read_is_bad_data_and_named(tmp_path, text):
    (tmp_path / "0001.jsonl").write_text(text)
    source = JsonlDir(JsonlDirConfig(path=tmp_path, columns={"id": "int64"}))
    with pytest.raises(DataError, match=r"PEN-3001 .*0001\.jsonl"):
        list(source.read("0001.jsonl"))


def test_an_empty_file_holds_no_rows(tmp_path):
    (tmp_path / "0001.jsonl").touch()
    source = JsonlDir(JsonlDirConfig(path=tmp_path, columns={"id": "int64"}))
    assert list(source.read("0001.jsonl")) == []


def test_the_page_shows_the_connector_and_its_test_as_they_are():
    page = (ROOT / "docs" / "writing-a-connector.md").read_text()
    connector = (ROOT / "examples" / "jsonl_dir.py").read_text()
    length = len(connector.splitlines())
    assert length < 80
    assert f" {length} lines" in page
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert shown
    for block in shown:
        assert any(
            lines_of(block) in lines_of(text) for text in (connector, Path(__file__).read_text(), *scaffold())
        ), block


def scaffold():
    """What `penstock new source acme` writes for sources that are polled or push."""
    for template in (ROOT / "src" / "penstock" / "cli" / "templates").glob("[ps]*_source.py.txt"):
        yield Template(template.read_text()).substitute(name="acme", Class="Acme", title="acme")


def test_the_page_lists_the_columns_of_an_envelope_as_they_are():
    page = (ROOT / "docs" / "writing-a-connector.md").read_text()
    for field in ENVELOPE_SCHEMA:
        assert f"| `{field.name}` | {field.type} |" in page


@pytest.mark.parametrize("contract", [PollingSource, Sender])
def test_the_page_lists_every_method_with_its_arguments(contract):
    page = (ROOT / "docs" / "writing-a-connector.md").read_text()
    for name, method in vars(contract).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            arguments = [each.partition(":")[0].strip() for each in inspect.signature(method).parameters][1:]
            shown = re.search(rf"`{name}\(([^)]*)\)", page)
            assert shown, name
            assert [each.partition("=")[0].strip() for each in shown[1].split(",") if each] == arguments


def lines_of(code):
    """The code without its indentation and empty lines, which a formatter may set otherwise in a page."""
    return "\n".join(line.strip() for line in code.splitlines() if line.strip())
