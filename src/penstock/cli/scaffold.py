"""`penstock new`: a connector that works and passes the kit, to be changed into the one that is wanted."""

from __future__ import annotations

import importlib.util
from importlib.resources import files
from pathlib import Path
from string import Template

from rich.console import Console
from rich.text import Text

from penstock.errors import ConfigError

KINDS = ("range", "polling", "streaming")
"""The kinds of sources, the first being the default."""


def write(what: str, kind: str, name: str, directory: Path, console: Console) -> None:
    """Write `<name>.py` and `test_<name>.py`; existing files are left alone."""
    if what not in ("source", "sink"):
        raise ConfigError(f"a connector is not a {what!r}", hint="it is a source or a sink")
    if kind not in KINDS:
        raise ConfigError(f"there is no source of kind {kind!r}", hint=f"there are {', '.join(KINDS)}")
    if what == "sink" and kind != KINDS[0]:
        raise ConfigError("a sink has no kind", hint="leave --kind out")
    template = "sink" if what == "sink" else f"{kind}_source"
    if not name.isidentifier() or name != name.lower():
        raise ConfigError(f"{name!r} cannot be a connector's name", hint="lower case, with _ between words: acme_crm")
    words = {"name": name, "Class": name.title().replace("_", ""), "title": name.replace("_", " ")}
    connector, test = directory / f"{name}.py", directory / f"test_{name}.py"
    for path in (connector, test):
        if path.exists():
            raise ConfigError(f"{path} exists already", hint="choose another name or another --dir")
    directory.mkdir(parents=True, exist_ok=True)
    for path, text_file in ((connector, f"{template}.py.txt"), (test, f"test_{template}.py.txt")):
        text = (files("penstock.cli") / "templates" / text_file).read_text(encoding="utf-8")
        path.write_text(Template(text).substitute(words), encoding="utf-8")
        console.print(Text.assemble(("wrote ", "dim"), str(path)), soft_wrap=True)
    hint = "" if importlib.util.find_spec("pytest") else "   (needs pip install pytest)"
    console.print(
        Text(
            f"\nTest it:             python -m pytest {test}{hint}\n"
            f'Use it where it is:  connector = "{name}:{words["Class"]}"   (beside the pipeline file)\n'
            f"Use it by its name:  in its pyproject.toml\n"
            f'  [project.entry-points."penstock.connectors"]\n'
            f'  {name} = "{name}:{words["Class"]}"'
        ),
        soft_wrap=True,
    )
