"""`penstock dlq`: the records that could not be used, trying them again after a fix, and letting go of them."""

from __future__ import annotations

import base64
import json as codec
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.errors import ConfigError
from penstock.pipeline import Pipeline
from penstock.runtime.epochs import State
from penstock.runtime.messages.letters import LETTERS, REPLAY, rows_of
from penstock.runtime.messages.replay import Replayed, ReplayRequests, Step, Verb, fates, having
from penstock.runtime.messages.store import read_letters, wants_letters
from penstock.runtime.telemetry import ENDED, read_status

ACTIONS = ("show", "replay", "drop")

SHOWN_BYTES = 300
"""Of a payload on a terminal."""


class Store:
    """The default store of a pipeline, and what its state says of the letters in it."""

    def __init__(self, pipeline: Pipeline, *, whole: bool = False) -> None:
        """`whole`: with what the letters hold, not only what they are."""
        processing = pipeline.processing
        if processing.dead_letter_sink is not None and wants_letters(pipeline):
            raise ConfigError(
                f"the dead letters of {pipeline.name} go to the sink {processing.dead_letter_sink!r}",
                code="PEN-1009",
                hint="look at the topic /_dead_letters there; to replay from here, leave out `dead_letter_sink`",
            )
        self.directory = processing.state_dir
        self.letters = read_letters(self.directory, LETTERS.names if whole else _ABOUT)
        state = State(self.directory, pipeline.name).peek()
        self.incarnation = state.identity.incarnation
        self.done = _position(state).steps

    def states(self) -> npt.NDArray[np.str_]:
        """What has become of each letter."""
        names = np.array([*(_PAST[step.verb] for step in self.done), "open"])  # -1 is the last one
        mine = having(self.letters, {"incarnation": self.incarnation})
        return np.where(mine, names[fates(self.letters, self.done)], "superseded")

    def chosen(self, where: Mapping[str, str], *, every: bool = False) -> tuple[pa.Table, list[str]]:
        """The letters that have these values, the newest last, and what has become of each; only open ones unless `every`."""
        states = self.states()
        places = np.flatnonzero(having(self.letters, where) & (every | (states == "open")))
        places = places[np.argsort(self.letters.column("epoch").to_numpy()[places], kind="stable")]
        return self.letters.take(pa.array(places, pa.int64())), states[places].tolist()


def _position(state: State) -> Replayed:
    newest = state.newest
    if newest is None or REPLAY not in newest.ranges:
        return Replayed()
    span = newest.ranges[REPLAY]
    return Replayed.model_validate(span.end if newest.state == "committed" else span.start)


_ABOUT = [name for name in LETTERS.names if name not in ("key", "payload", "attributes", "offset")]

_PAST = {"replay": "replayed", "drop": "dropped"}


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
    store = Store(pipeline, whole=json or sample > 0)
    letters, states = store.chosen(where, every=every)
    if json:
        chosen = letters.slice(max(0, letters.num_rows - sample)) if sample else letters
        lines = zip(chosen.to_pylist(), states[letters.num_rows - chosen.num_rows :], strict=True)
        print(codec.dumps([_plain(letter, state) for letter, state in lines], ensure_ascii=False, indent=1))
        return
    if not letters.num_rows:
        console.print(
            Text(f"{pipeline.name} has no {'' if every else 'open '}dead letters" + (" like that" if where else ""))
        )
    else:
        console.print(_summary(letters, states, every))
    for letter in letters.slice(max(0, letters.num_rows - sample)).to_pylist() if sample else ():
        console.print(_one(letter), soft_wrap=True)
    for request in ReplayRequests.of(store.directory).pending():
        chosen_by = " ".join(f"{name}={value}" for name, value in request.step.where.items()) or "all"
        console.print(Text(f"asked for: {request.step.verb} {chosen_by}, up to epoch {request.step.epoch}", "yellow"))


def command(pipeline: Pipeline, verb: Verb, where: Mapping[str, str], console: Console) -> int:
    """Leave a request for the letters that are there now, and say when it is taken up; gives their number."""
    store = Store(pipeline)
    if not pipeline.processing.checkpoint:
        raise ConfigError(
            f"{pipeline.name} keeps no manifests, so nothing would say which letters were replayed",
            code="PEN-1009",
            hint="set checkpoint = true in [processing]",
        )
    letters, _ = store.chosen(where)
    if not letters.num_rows:
        console.print(Text(f"{pipeline.name} has no open dead letters" + (" like that" if where else "")))
        return 0
    last = max(letters.column("epoch").to_pylist())
    step = Step(verb=verb, incarnation=store.incarnation, epoch=last, where=where)
    ReplayRequests.of(store.directory).add(step)
    status = read_status(store.directory)
    runs = status is not None and status["state"] not in (*ENDED, "dead")
    when = "taken up with the next epoch" if runs else "kept for the next start"
    noun = "dead letter" if letters.num_rows == 1 else "dead letters"
    console.print(f"{verb} {letters.num_rows:,} {noun}: {when}", soft_wrap=True)
    unread = letters.column("kind").to_pylist().count("record")
    if verb == "replay" and unread:
        advice = "correct them in the source, and let go of them with penstock dlq drop --where kind=record"
        console.print(
            f"{unread:,} of them will fail again, since the source could not read them: {advice}", soft_wrap=True
        )
    return int(letters.num_rows)


def _summary(letters: pa.Table, states: Sequence[str], every: bool) -> Table:
    names = ("topic", "sink", "code", "rule", "attempt")
    rows = zip(*(letters.column(name).to_pylist() for name in names), states, strict=True)
    counts = Counter(rows)
    table = Table("letters", *names, *(["state"] if every else []), box=None, header_style="dim", padding=(0, 2, 0, 0))
    for row, count in sorted(counts.items(), key=lambda each: (-each[1], repr(each[0]))):
        shown = row if every else row[:-1]
        table.add_row(f"{count:,}", *(Text("" if each is None else str(each)) for each in shown))
    return table


def _one(letter: Mapping[str, Any]) -> Text:
    where = f"{letter['source']}/{letter['stream']}" + (f" → {letter['topic']}" if letter["topic"] else "")
    offset = letter["offset"]
    at = f" at {offset['partition']}@{offset['value']}" if offset else ""
    text = Text.assemble(("\n" + where, "bold"), f"{at}, epoch {letter['epoch']}, attempt {letter['attempt']}\n")
    text.append(f"{letter['code']} {letter['reason']} ({letter['rule']})\n", "red")
    payload = _payload(letter)
    shown = payload if isinstance(payload, str) else codec.dumps(payload, default=str, ensure_ascii=False)
    return text.append(shown[:SHOWN_BYTES] + ("…" if len(shown) > SHOWN_BYTES else ""), "dim")


def _payload(letter: Mapping[str, Any]) -> Any:
    """The payload for people: text, the row, or bytes in base64."""
    payload = letter["payload"]
    if payload is None:
        return None
    if letter["kind"] in ("row", "input"):
        return rows_of(payload).to_pylist()[0]
    return _text(payload)


def _text(value: bytes) -> Any:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _plain(letter: Mapping[str, Any], state: str) -> dict[str, Any]:
    found = {**letter, "payload": _payload(letter), "attributes": dict(letter["attributes"] or ()), "state": state}
    if letter["key"] is not None:
        found["key"] = _text(letter["key"])
    dates = {name: value.isoformat() for name, value in letter.items() if isinstance(value, datetime)}
    return codec.loads(codec.dumps({**found, **dates}, default=str))  # type: ignore[no-any-return]
