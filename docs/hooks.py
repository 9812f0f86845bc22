"""What the site holds besides `docs`: the README and the examples, to which pages lead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
SHOWN = {".toml": "toml", ".py": "python"}

_OUT = re.compile(r"\]\(\.\./(README\.md|examples/?)([\w./-]*)\)")
"""A link of a page in `docs` to what is not there."""


def on_files(files: Files, config: Any) -> None:
    """Add two pages."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    inside = readme.replace("](docs/connectors)", "](docs/README.md)").replace("](docs/", "](")
    files.append(File.generated(config, "about.md", content=_led(inside.replace("](examples)", "](../examples)"))))
    files.append(File.generated(config, "examples.md", content=_examples()))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead to those pages."""
    return _led(markdown) if "/" not in page.file.src_uri else markdown


def _led(markdown: str) -> str:
    def inside(link: re.Match[str]) -> str:
        page = "about.md" if link[1] == "README.md" else "examples.md"
        return f"]({page}#{_anchor(link[2])})" if link[2] else f"]({page})"

    return _OUT.sub(inside, markdown)


def _examples() -> str:
    parts = ["# Examples", "They stand in `examples`, and the tests run every one of them."]
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in SHOWN:
            parts += [f"## {path.name}", f"```{SHOWN[path.suffix]}\n{path.read_text(encoding='utf-8')}```"]
    return "\n\n".join(parts) + "\n"


def _anchor(name: str) -> str:
    return re.sub(r"[^\w-]", "", name.lower())
