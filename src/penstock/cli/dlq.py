"""`penstock dlq`: the records that could not be used, trying them again after a fix, and letting go of them."""

from __future__ import annotations

import json as codec
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.text import Text

from penstock.cli.terminal import json_text, listing
from penstock.errors import ConfigError, printable
from penstock.pipeline import Pipeline
from penstock.runtime.commands import letters_asked
from penstock.runtime.messages.box import Store, payload_of, plain
from penstock.runtime.messages.replay import ReplayRequests, Verb

__all__ = ["Store", "command", "parse", "show"]

ACTIONS = ("show", "replay", "drop")

SHOWN_BYTES = 300
"""Of a payload on a terminal."""


def parse(words: Sequence[str]) -> tuple[str, Path | None]:
    """The action, and the file if one is named, of `[FILE] show|replay|drop`."""
    actions = [word for word in words if word in ACTIONS]
    files = [word for word in words if word not in ACTIONS]
    if len(actions) != 1 or len(files) > 1:
        raise ConfigError(f"dlq {' '.join(words)}", hint=f"penstock dlq {'|'.join(ACTIONS)} FILE")
    return actions[0], Path(files[0]) if files else None


def show(
    pipeline: Pipeline, where: Mapping[str, str], console: Console, *, sample: int, json: bool, every: bool
) -> None:
    """Print how many letters there are of each kind, and the newest few."""
    store = Store(pipeline, whole=json and not sample)
    letters, states = store.chosen(where, every=every)
    newest = store.newest(sample, where, every=every) if sample else []
    if json:
        lines = newest if sample else zip(letters.to_pylist(), states, strict=True)
        print(json_text([plain(letter, state) for letter, state in lines], indent=1))
        return
    if not letters.num_rows:
        console.print(
            Text(f"{pipeline.name} has no {'' if every else 'open '}dead letters" + (" like that" if where else ""))
        )
    else:
        _summarise(console, letters, states, every)
    for letter, _ in newest:
        console.print(_one(letter), soft_wrap=True)
    for request in ReplayRequests.of(store.directory).pending():
        chosen_by = " ".join(f"{name}={value}" for name, value in request.step.where.items()) or "all"
        line = f"asked for: {request.step.verb} {chosen_by}, up to epoch {request.step.epoch}"
        if request.letters not in ("", pipeline.processing.dead_letter_sink):
            line += f"; it waits for a run with dead_letter_sink = {request.letters!r}"
        console.print(Text(line, "yellow"))


def command(pipeline: Pipeline, verb: Verb, where: Mapping[str, str], console: Console) -> int:
    """Leave a request for the letters that are there now, and say when it is taken up; gives their number."""
    count, lines = letters_asked(pipeline, verb, where, "command line")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    return count


def _summarise(console: Console, letters: pa.Table, states: Sequence[str], every: bool) -> None:
    names = ("topic", "sink", "code", "rule", "attempt")
    found = zip(*(letters.column(name).to_pylist() for name in names), states, strict=True)
    counts = Counter(found)
    rows = [
        (f"{count:,}", *("" if each is None else printable(str(each)) for each in (row if every else row[:-1])))
        for row, count in sorted(counts.items(), key=lambda each: (-each[1], repr(each[0])))
    ]
    listing(console, ("letters", *names, *(["state"] if every else [])), rows)


def _one(letter: Mapping[str, Any]) -> Text:
    where = f"{letter['source']}/{printable(letter['stream'])}" + (f" → {letter['topic']}" if letter["topic"] else "")
    offset = letter["offset"]
    at = f" at {offset['partition']}@{offset['value']}" if offset else ""
    text = Text.assemble(("\n" + where, "bold"), f"{at}, epoch {letter['epoch']}, attempt {letter['attempt']}\n")
    text.append(f"{letter['code']} {printable(letter['reason'])} ({letter['rule']})\n", "red")
    payload = payload_of(letter)
    shown = payload if isinstance(payload, str) else codec.dumps(payload, default=str, ensure_ascii=False)
    return text.append(printable(shown[:SHOWN_BYTES]) + ("…" if len(shown) > SHOWN_BYTES else ""), "dim")
