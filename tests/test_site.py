"""The docs site: it builds, its links lead somewhere, its search knows the pages."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from penstock.runtime.telemetry import boards

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(made)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    broken = []
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for link in re.findall(r'(?:href|src)="([^"]+)"', page.read_text()):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or not parts.path:
                continue
            there = (page.parent / unquote(parts.path)).resolve()
            if not there.is_file() or not there.is_relative_to(site.resolve()):
                broken.append((str(page.relative_to(site)), link))
    assert broken == []


def test_every_anchor_of_the_site_exists(site: Path) -> None:
    made = {page.resolve(): set(re.findall(r'\bid="([^"]+)"', page.read_text())) for page in site.rglob("*.html")}
    broken = []
    for page in made:
        for link, anchor in re.findall(r'href="([^"#:]*)#([^"]+)"', page.read_text()):
            there = (page.parent / unquote(link)).resolve() if link else page
            if there in made and unquote(anchor) not in made[there] | {"__skip"}:
                broken.append((page.name, f"{link}#{anchor}"))
    assert broken == []


def test_the_search_knows_every_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    pages = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in ROOT.glob("docs/**/*.md")}
    assert {page.replace("README.html", "index.html") for page in pages} - {"index.html"} <= found


def test_the_yaml_that_is_shown_is_yaml_and_names_what_exists() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "production.md").read_text(), re.DOTALL)
    loaded = [yaml.safe_load(block) for block in blocks]
    assert [each.get("kind") for each in loaded] == ["StatefulSet", None]
    container = loaded[0]["spec"]["template"]["spec"]["containers"][0]
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_the_alert_rules_are_yaml() -> None:
    rules = yaml.safe_load((ROOT / "docs" / "grafana" / "alerts.yml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in boards.ALERTS]
    assert [rule["expr"] for rule in rules] == [alert.expression for alert in boards.ALERTS]


def test_the_unit_that_is_shown_is_one_that_systemd_takes(tmp_path: Path) -> None:
    (unit,) = re.findall(r"```ini\n(.*?)```", (ROOT / "docs" / "operating.md").read_text(), re.DOTALL)
    found = configparser.RawConfigParser()
    found.read_string(unit)
    assert found["Service"]["KillMode"] == "mixed", "a signal for Penstock alone"
    assert found["Service"]["RestartPreventExitStatus"] == "2"
    command = found["Service"]["ExecStart"]
    assert command.endswith("/penstock run pipeline.toml")
    if analyse := shutil.which("systemd-analyze"):
        here = unit.replace(command, f"{sys.executable} -m penstock run pipeline.toml").replace("User=penstock\n", "")
        (tmp_path / "orders.service").write_text(here)
        done = subprocess.run(
            [analyse, "verify", tmp_path / "orders.service"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "orders.service" not in done.stderr, "nothing of it is unknown"
