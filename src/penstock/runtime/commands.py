"""
What a person may ask of a pipeline, running or not: the command line and the console call the same functions.

Each leaves a request in the state directory, says when it is taken up, and writes a line to `audit.jsonl`.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from penstock.durable import Json
from penstock.errors import ConfigError, ConnectorError, FatalError
from penstock.pipeline import Pipeline
from penstock.requests import Inbox
from penstock.runtime.epochs import State
from penstock.runtime.messages.box import Store
from penstock.runtime.messages.replay import ReplayRequests, Step
from penstock.runtime.messages.replay import Verb as LetterVerb
from penstock.runtime.telemetry import ENDED, read_status
from penstock.tables import Request, Requests, TableSource, TableState, Verb, routed

AUDIT = "audit.jsonl"

EndVerb = Literal["stop", "drain"]


class EndRequest(BaseModel):
    """What somebody asks for with `penstock stop`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    verb: EndVerb


def end_requests(state_dir: Path) -> Inbox[EndRequest]:
    """Where a running pipeline looks for requests to end."""
    return Inbox(state_dir / "control", EndRequest)


def is_running(state_dir: Path) -> bool:
    """True while a run has the state directory."""
    status = read_status(state_dir)
    return status is not None and status["state"] not in (*ENDED, "dead")


# -- the audit ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def audited(state_dir: Path, who: str, action: str, detail: Json) -> Iterator[list[str]]:
    """Write who asked for what, and what came of it; the lines that the caller adds to what this gives are the answer."""
    said: list[str] = []
    try:
        yield said
    except ConnectorError as error:
        _write_audit(state_dir, who, action, detail, "refused", f"{error.code} {error.message}")
        raise
    _write_audit(state_dir, who, action, detail, "done", "; ".join(said))


def _write_audit(state_dir: Path, who: str, action: str, detail: Json, outcome: str, said: str) -> None:
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = {
        "at": at,
        "who": who,
        "user": os.getuid(),
        "action": action,
        "detail": detail,
        "outcome": outcome,
        "said": said,
    }
    if not state_dir.is_dir():
        return  # it never ran, and was refused for that
    with (
        contextlib.suppress(OSError),
        open(os.open(state_dir / AUDIT, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as file,
    ):
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_audit(state_dir: Path, most: int = 50) -> list[Json]:
    """The newest entries, the last one first."""
    try:
        lines = (state_dir / AUDIT).read_text(encoding="utf-8").splitlines()[-most:]
    except OSError:
        return []
    found = []
    for line in reversed(lines):
        with contextlib.suppress(ValueError):  # half a line of a machine that lost power
            found.append(json.loads(line))
    return found


# -- ending ---------------------------------------------------------------------------------------------------------------


def end_asked(pipeline: Pipeline, verb: EndVerb, who: str) -> list[str]:
    """Ask a running pipeline to finish the epoch in hand, or all that is there now, and to end."""
    state_dir = pipeline.processing.state_dir
    with audited(state_dir, who, verb, {}) as said:
        if not is_running(state_dir):
            raise FatalError(f"{pipeline.name} does not run", hint="penstock status FILE says how it ended")
        end_requests(state_dir).leave(lambda name: EndRequest(name=name, verb=verb))
        what = "the epoch in hand is finished" if verb == "stop" else "all that is there now is committed"
        said.append(f"{verb} {pipeline.name}: it ends once {what}")
    return said


# -- dead letters ---------------------------------------------------------------------------------------------------------


def letters_asked(pipeline: Pipeline, verb: LetterVerb, where: Mapping[str, str], who: str) -> tuple[int, list[str]]:
    """Leave a request for the letters that are there now; gives their number, and what there is to say."""
    with audited(pipeline.processing.state_dir, who, f"letters {verb}", dict(where)) as said:
        count = _ask_for_letters(pipeline, verb, where, said)
    return count, said


def _ask_for_letters(pipeline: Pipeline, verb: LetterVerb, where: Mapping[str, str], said: list[str]) -> int:
    store = Store(pipeline)
    if not pipeline.processing.checkpoint:
        raise ConfigError(
            f"{pipeline.name} keeps no manifests, so nothing would say which letters were replayed",
            code="PEN-1009",
            hint="set checkpoint = true in [processing]",
        )
    letters, _ = store.chosen(where)
    if not letters.num_rows:
        said.append(f"{pipeline.name} has no open dead letters" + (" like that" if where else ""))
        return 0
    last = max(letters.column("epoch").to_pylist())
    step = Step(verb=verb, incarnation=store.incarnation, epoch=last, where=dict(where))
    ReplayRequests.of(store.directory).add(step, pipeline.processing.dead_letter_sink or "")
    noun = "dead letter" if letters.num_rows == 1 else "dead letters"
    said.append(f"{verb} {letters.num_rows:,} {noun}: {_when(store.directory)}")
    if verb == "replay" and any(each.uses_file for each in pipeline.schemas.entries) and is_running(store.directory):
        said.append(
            "it keeps the schema files that it was started with: if one has changed, start it again, then replay"
        )
    unread = letters.column("kind").to_pylist().count("record")
    if verb == "replay" and unread:
        advice = "correct them in the source, and let go of them with penstock dlq drop --where kind=record"
        said.append(f"{unread:,} of them will fail again, since the source could not read them: {advice}")
    return int(letters.num_rows)


def _when(state_dir: Path) -> str:
    return "taken up with the next epoch" if is_running(state_dir) else "kept for the next start"


# -- tables ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TablesOf:
    """A source that has tables, where it keeps its requests, and what its newest position says of them."""

    name: str
    directory: Path
    states: Mapping[str, TableState]

    @property
    def requests(self) -> list[Request]:
        return Requests(self.directory).pending()


def tables_asked(pipeline: Pipeline, verb: Verb, names: Sequence[str], who: str, source: str = "") -> list[str]:
    """Leave a command for the sources of these tables, and say when it is taken up; `source`: for this one alone."""
    detail = [f"{name} of {source}" if source else name for name in names]
    with audited(pipeline.processing.state_dir, who, f"tables {verb}", detail) as said:
        _ask_for_tables(pipeline, verb, names, said, source)
    return said


def _ask_for_tables(pipeline: Pipeline, verb: Verb, names: Sequence[str], said: list[str], source: str) -> None:
    sources = table_sources(pipeline, source)
    chosen = chosen_tables(sources, names)
    for known in sources:
        streams = chosen[known.name]
        left_out = [stream for stream in streams if known.states[stream].state == "left_out"]
        if left_out and len(left_out) == len(streams):
            state = known.states[left_out[0]]
            raise ConfigError(f"{left_out[0]} cannot be captured: {state.error}", hint=state.hint)
        streams = chosen[known.name] = [stream for stream in streams if stream not in left_out]
        skipped = [stream for stream in streams if known.states[stream].state == "skipped"]
        if verb == "resume" and skipped and len(skipped) == len(streams):
            raise ConfigError(f"{skipped[0]} is skipped, not paused", hint=f"penstock tables resync FILE {skipped[0]}")
    for known in sources:
        if chosen[known.name]:
            Requests(known.directory).add(verb, chosen[known.name])
            said.append(f"{verb} {', '.join(chosen[known.name])}: {_when(pipeline.processing.state_dir)}")


def table_sources(pipeline: Pipeline, only: str = "") -> list[TablesOf]:
    """The sources that have tables, or one of them, each with what its newest position says of them."""
    state = State.of(pipeline).peek()
    found = [
        TablesOf(
            name,
            state.directory / "sources" / name,
            routed(_states(state, name, source), partial(pipeline.router.leaves_out, name)),
        )
        for name, source in pipeline.sources.items()
        if isinstance(source, TableSource)
    ]
    if not found:
        raise ConfigError(f"no source of {pipeline.name} has tables", hint="sources that copy tables do: postgres_cdc")
    if only and all(each.name != only for each in found):
        raise ConfigError(
            f"no source {only!r} has tables", hint=f"those that do: {', '.join(each.name for each in found)}"
        )
    return [each for each in found if only in ("", each.name)]


def _states(state: State, name: str, source: TableSource[Any, Any]) -> Mapping[str, TableState]:
    newest = state.newest
    if newest is None or name not in newest.ranges:
        return {}
    span, ended = newest.ranges[name], newest.state == "committed"
    position = source.position_type.model_validate(span.end if ended else span.start)
    return source.tables(source.next_start(position, newest.notes.get(name, ()) if ended else ()))


def chosen_tables(sources: Sequence[TablesOf], names: Sequence[str]) -> dict[str, list[str]]:
    """Per source the tables that the names and patterns choose; each must choose one."""
    everything = sorted({stream for known in sources for stream in known.states})
    for name in names:
        if not any(_fits(stream, name, everything) for stream in everything):
            nearest = difflib.get_close_matches(name, everything, n=1, cutoff=0)
            raise ConfigError(
                f"no table is called {name!r}" + (f"; the nearest is {nearest[0]!r}" if nearest else ""),
                hint="penstock tables show FILE lists them" if everything else "it has not run yet: penstock run FILE",
            )
    return {
        known.name: [stream for stream in known.states if any(_fits(stream, name, everything) for name in names)]
        for known in sources
    }


def _fits(stream: str, name: str, everything: Collection[str]) -> bool:
    """A name is a pattern only where no table is called so."""
    return stream == name or (name not in everything and fnmatchcase(stream, name))
