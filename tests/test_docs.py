"""What the pages show must work: pipelines are checked, commands parsed, links followed, metrics and codes compared."""

from __future__ import annotations

import re
import shlex
import shutil
import threading
from pathlib import Path

import pytest
import typer

from penstock.cli import app
from penstock.errors import CODES
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.runtime.messages.box import Store
from penstock.runtime.telemetry import Telemetry
from penstock.testing import ForkEngine

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
}


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (page, text)
        for page, whole in PAGES.items()
        for text in re.findall(rf"```{language}\n(.*?)```", whole, re.DOTALL)
    ]


def place_modules(directory: Path) -> None:
    """Put the modules that pages speak of beside the pipeline file."""
    shutil.copy(ROOT / "examples" / "jsonl_dir.py", directory)
    for _, text in blocks("python"):
        if named := re.match(r"# (\w+\.py)\b", text):
            (directory / named[1]).write_text(text)


@pytest.mark.parametrize(("page", "text"), blocks("toml"))
def test_a_pipeline_that_is_shown_is_valid(page, text, tmp_path, monkeypatch, own_modules):
    place_modules(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    if "connector_name" not in text:
        text = f'connector_name = "shown"\n{text}'
    if "[source" not in text:
        text += '\n[source]\nconnector = "generator"\nstreams = ["orders"]\n'
    if "[sink" not in text:
        text += '\n[sink]\nconnector = "console"\n'
    for name in re.findall(r'schema_file = "(.+?)"', text):
        (tmp_path / name).write_text('{"type": "record", "name": "Shown", "fields": []}')
    (tmp_path / "pipeline.toml").write_text(text)
    Pipeline.from_toml(tmp_path / "pipeline.toml")


@pytest.mark.processes
def test_the_quickstart_runs_as_it_is_shown_in_one_directory(tmp_path):
    page = PAGES["docs/quickstart.md"]
    first, letters = (text.replace("8601", "0") for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL))
    rate = re.search(r"^rows_per_sec = \d+$", page, re.MULTILINE)[0]
    (tmp_path / "in").mkdir()
    lines = shlex.split(re.search(r"^printf '%s.n' (.*) > in/a.jsonl$", page, re.MULTILINE)[1])
    (tmp_path / "in" / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def run(text, **how):
        (tmp_path / "pipeline.toml").write_text(text)
        return supervisor.run(Pipeline.from_toml(tmp_path / "pipeline.toml"), ForkEngine(1), **how)

    assert run(first, drain=True).rows_out == 100_000
    telemetry, stop = Telemetry("first", sources=["generator"]), threading.Event()
    telemetry.epoch = lambda report: stop.set()
    run(first.replace("rows = 100_000", rate), telemetry=telemetry, stop=stop)
    assert stop.is_set()
    assert run(letters, drain=True).rows_in == 3
    letter = Store(Pipeline.from_toml(tmp_path / "pipeline.toml")).newest(3, {})[0][0]
    assert letter["payload"] == lines[1].encode()
    (tmp_path / "in" / "b.jsonl").write_text('{"id": 3}\n')
    assert run(letters, drain=True).rows_in == 1


@pytest.mark.parametrize(
    "line", sorted({line for _, text in blocks("sh") for line in text.splitlines() if re.search(r"\bpenstock ", line)})
)
def test_a_command_that_is_shown_can_be_parsed(line):
    words = shlex.split(line, comments=True)
    name, *rest = words[words.index("penstock") + 1 :]
    command = typer.main.get_command(app).commands[name]
    context = command.make_context(name, rest)
    if isinstance(command, typer.core.TyperGroup):
        word, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        command.make_context(word, rest)


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[page])
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def anchors(text):
    """The anchors of a page's headings, as the site and GitHub make them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head) for head in heads)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in plain}


@pytest.mark.parametrize("page", PAGES)
def test_its_anchors_exist(page):
    broken = []
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", PAGES[page]):
        there = (ROOT / page).parent.joinpath(link).resolve() if link else ROOT / page
        text = PAGES.get(str(there.relative_to(ROOT)))
        if text is not None and anchor not in anchors(text):
            broken.append(f"{link}#{anchor}")
    assert broken == []


def test_the_map_names_every_page():
    named = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([^)#]+)\)", PAGES["docs/README.md"])}
    assert {path for path in ROOT.glob("docs/**/*.md") if path.name != "README.md"} <= named


@pytest.mark.parametrize("page", PAGES)
def test_its_error_codes_exist(page):
    assert set(re.findall(r"PEN-\d{4}", PAGES[page])) <= set(CODES)


def test_the_metrics_are_those_that_are_scraped():
    shown = set(re.findall(r"^\| `(penstock_\w+)` \|", PAGES["docs/operating.md"], re.MULTILINE))
    types = re.findall(r"^# TYPE (\w+) (\w+)$", Telemetry("x").metrics().decode(), re.MULTILINE)
    assert shown == {name for name, _ in types if not name.endswith("_created")}
