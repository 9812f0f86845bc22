"""What the README shows must work: its pipelines are checked, its links lead somewhere, its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from penstock.cli import app
from penstock.pipeline import Pipeline

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_its_pipeline_is_valid_and_short(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    assert len(text.strip().splitlines()) <= 10
    (tmp_path / "pipeline.toml").write_text(text)
    assert Pipeline.from_toml(tmp_path / "pipeline.toml").name == "events-to-lake"


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)", README))))
def test_its_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_its_commands_exist():
    known = set(typer.main.get_command(app).commands)
    named = set(re.findall(r"^penstock (\w+)", README, re.MULTILINE)) | set(
        re.findall(r"`(\w+)` (?:lists|shows|writes|looks)", README)
    )
    assert named == known
