"""`penstock new`: a connector that works and passes the kit, to be changed into the one that is wanted."""

from __future__ import annotations

import importlib.util
from importlib.resources import files
from pathlib import Path
from string import Template

from rich.console import Console
from rich.text import Text

from penstock.errors import ConfigError


def write(kind: str, name: str, directory: Path, console: Console) -> None:
    """Write `<name>.py` and `test_<name>.py`; files that are there stay as they are."""
    if kind not in ("source", "sink"):
        raise ConfigError(f"there is no connector of kind {kind!r}", hint="it is source or sink")
    if not name.isidentifier() or name != name.lower():
        raise ConfigError(f"{name!r} cannot be a connector's name", hint="lower case, with _ between words: acme_crm")
    words = {"name": name, "Class": name.title().replace("_", ""), "title": name.replace("_", " ")}
    connector, test = directory / f"{name}.py", directory / f"test_{name}.py"
    for path in (connector, test):
        if path.exists():
            raise ConfigError(f"{path} is there already", hint="choose another name or another --dir")
    directory.mkdir(parents=True, exist_ok=True)
    for path, template in ((connector, f"{kind}.py.txt"), (test, f"test_{kind}.py.txt")):
        text = (files("penstock.cli") / "templates" / template).read_text(encoding="utf-8")
        path.write_text(Template(text).substitute(words), encoding="utf-8")
        console.print(Text.assemble(("wrote ", "dim"), str(path)), soft_wrap=True)
    hint = "" if importlib.util.find_spec("pytest") else "   (needs pip install pytest)"
    console.print(
        Text(
            f"\nTest it:             python -m pytest {test}{hint}\n"
            f'Use it as it lies:   connector = "{name}:{words["Class"]}"   (beside the pipeline file)\n'
            f"Use it by its name:  in its pyproject.toml\n"
            f'  [project.entry-points."penstock.connectors"]\n'
            f'  {name} = "{name}:{words["Class"]}"'
        ),
        soft_wrap=True,
    )
