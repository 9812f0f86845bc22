"""The dead letters of a pipeline, and what has become of each."""

from __future__ import annotations

import base64
import json as codec
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from penstock.errors import ConfigError
from penstock.pipeline import Pipeline
from penstock.runtime.epochs import State
from penstock.runtime.messages.letters import LETTERS, REPLAY, rows_of
from penstock.runtime.messages.replay import Replayed, fates, having
from penstock.runtime.messages.store import read_letters, readable_sink, wants_letters


class Store:
    """Where a pipeline keeps its dead letters, and what its state says of them."""

    def __init__(self, pipeline: Pipeline, *, whole: bool = False) -> None:
        """`whole`: with what the letters hold, not only what they are."""
        processing = pipeline.processing
        named = processing.dead_letter_sink
        if named is not None and wants_letters(pipeline) and readable_sink(pipeline) is None:
            raise ConfigError(
                f"the dead letters of {pipeline.name} go to the sink {named!r}, which cannot be read from here",
                code="PEN-1009",
                hint="look at the topic /_dead_letters there; to replay, name a delta, iceberg, files or postgres sink, "
                "or leave out `dead_letter_sink`",
            )
        self.directory = processing.state_dir
        state = State.of(pipeline).peek()  # first: the letters may be a part of a state that is kept elsewhere
        self._stored = read_letters(pipeline, LETTERS.names if whole else _ABOUT)
        self.letters = self._stored.letters
        self.incarnation = state.identity.incarnation
        self.done = _position(state).steps

    def states(self) -> npt.NDArray[np.str_]:
        """What has become of each letter."""
        names = np.array([*(_PAST[step.verb] for step in self.done), "open"])  # -1 is the last one
        mine = having(self.letters, {"incarnation": self.incarnation})
        return np.where(mine, names[fates(self.letters, self.done)], "superseded")

    def chosen(self, where: Mapping[str, str], *, every: bool = False) -> tuple[pa.Table, list[str]]:
        """The letters that have these values, the newest last, and what has become of each; only open ones unless `every`."""
        states, places = self._places(where, every)
        return self.letters.take(pa.array(places, pa.int64())), states[places].tolist()

    def newest(
        self, count: int, where: Mapping[str, str], *, every: bool = False
    ) -> list[tuple[Mapping[str, Any], str]]:
        """The last few of those letters, whole, and what has become of each."""
        states, places = self._places(where, every)
        last = places[max(0, len(places) - count) :]
        return list(zip(self._stored.whole(last.tolist()).to_pylist(), states[last].tolist(), strict=True))

    def _places(self, where: Mapping[str, str], every: bool) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.intp]]:
        states = self.states()
        places = np.flatnonzero(having(self.letters, where) & (every | (states == "open")))
        return states, places[np.argsort(self.letters.column("epoch").to_numpy()[places], kind="stable")]


def _position(state: State) -> Replayed:
    newest = state.newest
    if newest is None or REPLAY not in newest.ranges:
        return Replayed()
    span = newest.ranges[REPLAY]
    return Replayed.model_validate(span.end if newest.state == "committed" else span.start)


_ABOUT = [name for name in LETTERS.names if name not in ("key", "payload", "attributes", "offset")]

_PAST = {"replay": "replayed", "drop": "dropped"}


def payload_of(letter: Mapping[str, Any]) -> Any:
    """The payload for people: text, the row, or bytes in base64."""
    payload = letter["payload"]
    if payload is None:
        return None
    if letter["kind"] in ("row", "input"):
        rows = rows_of(payload)
        return as_json(rows.to_pylist()[0], pa.struct(list(rows.schema)))
    return _text(payload)


def as_json(value: Any, kind: pa.DataType) -> Any:
    """A value as JSON has it: a map is an object, bytes are text or base64."""
    if value is None:
        return None
    if types.is_map(kind):
        return {str(key): as_json(each, kind.item_type) for key, each in value}
    if types.is_struct(kind):
        return {each.name: as_json(value[each.name], each.type) for each in kind}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [as_json(each, kind.value_type) for each in value]
    return _text(value) if isinstance(value, bytes) else value


def _text(value: bytes) -> Any:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def plain(letter: Mapping[str, Any], state: str) -> dict[str, Any]:
    """A letter as JSON."""
    found = {**letter, "payload": payload_of(letter), "attributes": dict(letter["attributes"] or ()), "state": state}
    if letter["key"] is not None:
        found["key"] = _text(letter["key"])
    dates = {name: value.isoformat() for name, value in letter.items() if isinstance(value, datetime)}
    return codec.loads(codec.dumps({**found, **dates}, default=str))  # type: ignore[no-any-return]
