"""What every bench shares: a table for people, one line per claim for machines, and a result file."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from penstock.testing.s3 import cache

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "performance.md"


@dataclass
class Claim:
    """A ratio that was measured, and what it is meant to be."""

    name: str
    ratio: float
    sense: Literal[">=", "<="]
    target: float

    @property
    def met(self) -> bool:
        return self.ratio >= self.target if self.sense == ">=" else self.ratio <= self.target

    def __str__(self) -> str:
        return f"ratio {self.name} {self.ratio:.2f} target {self.sense} {self.target:g}"


@dataclass
class Bench:
    """Collects rows and claims; `finish` shows and stores them."""

    name: str
    title: str
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    part: bool = False
    """Only a part was measured: what the result file has of the others stays, if it is of the same commit and data."""
    began: float = field(default_factory=time.time)

    def row(self, what: str, figure: str, note: str = "") -> None:
        self.rows.append((what, figure, note))
        print(f"  {what}: {figure} {note}", file=sys.stderr, flush=True)

    def claim(self, name: str, ratio: float, sense: Literal[">=", "<="], target: float) -> None:
        self.claims.append(Claim(name, ratio, sense, target))

    def finish(self) -> None:
        table = Table(title=self.title, title_justify="left")
        for heading in ("what", "figure", ""):
            table.add_column(heading, justify="right" if heading == "figure" else "left")
        for row in self.rows:
            table.add_row(*row)
        Console(width=110).print(table)
        RESULTS.mkdir(exist_ok=True)
        result = {
            "bench": self.name,
            "title": self.title,
            "commit": commit(),
            "machine": machine(),
            "seconds": round(time.time() - self.began),
            "rows": self.rows,
            "claims": [
                {"name": c.name, "ratio": round(c.ratio, 3), "sense": c.sense, "target": c.target, "met": c.met}
                for c in self.claims
            ],
        }
        file = RESULTS / f"{self.name}.json"
        if self.part and file.exists():
            result = together(json.loads(file.read_text()), result)
        file.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
        PAGE.write_text(page())
        for claim in self.claims:
            print(claim)


def together(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Two parts of one bench; figures of another commit, machine or amount of data are not shown beside these."""
    if any(before[each] != now[each] for each in ("title", "commit", "machine")):
        return now
    rows = {row[0]: row for row in [*before["rows"], *now["rows"]]}
    claims = {claim["name"]: claim for claim in [*before["claims"], *now["claims"]]}
    seconds = before["seconds"] + now["seconds"]
    return {**now, "seconds": seconds, "rows": list(rows.values()), "claims": list(claims.values())}


def environment(name: str, *packages: str) -> Path:
    """A virtual environment of its own for peers, made once; they are not held to our versions of what they need."""
    made = cache() / f"bench-{name}"
    if not (made / "done").exists():
        shutil.rmtree(made, ignore_errors=True)
        venv.create(made, with_pip=True)
        free = {name: value for name, value in os.environ.items() if not name.endswith("_CONSTRAINT")}
        subprocess.run([made / "bin" / "python", "-m", "pip", "install", "--quiet", *packages], check=True, env=free)
        (made / "done").touch()
    return made


def commit() -> str:
    """The commit that was measured, marked when the tree differs from it; what runs write themselves does not count."""
    commands = (
        ["git", "rev-parse", "--short=12", "HEAD"],
        ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results", ":!docs/performance.md"],
    )
    head, changes = (
        subprocess.run(each, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() for each in commands
    )
    return f"{head or 'unknown'}{'-dirty' if changes else ''}"


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ("pyspark", "pyarrow", "deltalake", "pydantic")
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(memory),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def page() -> str:
    """`docs/performance.md`, from all result files."""
    lines = [
        "<!-- Written by the benches from bench/results; run `make bench`. -->",
        "",
        "# Performance",
        "",
        "Every figure is shown beside a peer or a limit that was measured in the same run, on the same data. A ratio is",
        "ours to theirs. `make bench` measures again; `make soak` repeats the kills.",
    ]
    for file in sorted(RESULTS.glob("*.json")):
        result = json.loads(file.read_text())
        where = result["machine"]
        if "bench" in result:
            lines += ["", f"## {result['title']}", "", "| what | figure | |", "|---|---:|---|"]
            lines += [f"| {what} | {figure} | {note} |" for what, figure, note in result["rows"]]
            lines += ["", "| claim | ratio | target | met |", "|---|---:|---:|---|"]
            lines += [
                f"| {c['name']} | {c['ratio']:.2f} | {c['sense']} {c['target']:g} | {'yes' if c['met'] else 'no'} |"
                for c in result["claims"]
            ]
        else:
            kills = ", ".join(f"{count} × {kind}" for kind, count in sorted(result["kills"].items()))
            lines += ["", f"## Soak: {result['soak']}", "", "| | |", "|---|---|", f"| kills | {kills} |"]
            shown = (
                "broker crashes",
                "restarts",
                "replays",
                "epochs",
                "rows",
                "messages",
                "letters",
                "lost",
                "doubled",
                "seed",
            )
            lines += [f"| {name} | {result[name]:,} |" for name in shown if name in result]
        machine_text = f"{where['cores']} cores, {where['memory_gib']} GiB, Python {where['python']}"
        lines += [
            "",
            f"Commit {result['commit']}; {machine_text}, pyspark {where['pyspark']}, pyarrow {where['pyarrow']}.",
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if PAGE.read_text() != page():
        sys.exit(f"{PAGE.relative_to(ROOT)} is not what the result files say: run `make bench`")
