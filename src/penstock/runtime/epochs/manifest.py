"""The durable records of the protocol: what an epoch is bound to, and whose state a directory holds."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from penstock.durable import Json
from penstock.sink import ABOUT, Topic, WriteResult

Held = dict[str, dict[Topic, tuple[str, int]]]
"""Per sink and topic an incarnation and a number; an empty incarnation is the one whose state this is."""


class Range(BaseModel):
    """From one position (included by the source's own rule) to a later one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: Json
    end: Json


class Recent(BaseModel):
    """Records of the last epochs, as far back as `max_error_rate` looks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limit: float
    """The `max_error_rate` under which they were let through: under another one the count begins again."""
    epochs: list[tuple[int, int]] = []
    """Of each epoch, or of several small ones, how many records could not be used, and of how many."""


class Manifest(BaseModel):
    """The durable record of one epoch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pipeline: str
    incarnation: str
    number: int
    state: Literal["planned", "prepared", "committed"] = "planned"
    ranges: dict[str, Range]
    parallelism: int = 1
    """How many tasks it was planned for."""
    attempts: list[str]
    """Every try at staging this epoch, the newest last."""
    only: list[tuple[str, Topic]] | None = None
    """The sinks and topics this epoch is for; None: all. Set for the epoch that completes another incarnation's."""
    receipts: dict[str, list[Json]] = {}
    applies: list[str] = []
    """Every try at the work that the commits of this epoch need, the newest last."""
    kept: dict[str, dict[Topic, str]] = {}
    """Per sink and topic the try whose files its commit names."""
    applied: dict[str, list[Json]] = {}
    """Per sink what those tries gave; only if there may be other files beside them."""
    held: Held = {}
    """The last epoch of every target that was ever committed to, before this one; after it once this one is committed."""
    replaced: dict[str, list[Json]] = {}
    """Receipts of a sink that lost some topics: what they name of the other topics is committed and must not be swept."""
    notes: dict[str, list[Json]] = {}
    versions: dict[str, int] = {}
    """The version of the schema by which messages of this epoch are decoded, per `[[schemas]]` entry."""
    columns: dict[Topic, str] = {}
    """Columns of topics whose format infers them, as far as they are known with this epoch."""
    pinned: dict[Topic, list[str]] = {}
    """Of these, columns in which whole numbers stay so, since a target cannot turn them into doubles."""
    barred: dict[str, dict[Topic, list[tuple[str, ...]]]] = {}
    """Per sink and topic columns and fields of these that it cannot have beside others, which an earlier task brought."""
    letters: dict[Topic, int] = {}
    """Dead letters of this epoch, per topic."""
    recent: Recent | None = None
    """Good and bad records before this epoch; with it once it is prepared."""
    rows_in: dict[str, int] = {}
    rows_out: dict[str, dict[Topic, tuple[int, int]]] = {}
    discarded: dict[str, dict[Topic, int]] = {}
    """Rows that `schema_evolution` left out or took a value from, per sink and topic."""
    skipped: int = 0
    restage: list[Topic] | None = None
    """Asked for by `offsets restage`: stage again what is not committed, without these topics."""
    unswept: list[int] = []
    """Epochs whose failed tries may have left staged data."""

    def written(self) -> dict[tuple[str, Topic], WriteResult]:
        """What the epoch wrote, per sink and topic."""
        written = {
            (sink, topic): WriteResult(rows, size)
            for sink, topics in self.rows_out.items()
            for topic, (rows, size) in topics.items()
        }
        for sink, topics in self.discarded.items():
            for topic, rows in topics.items():
                written[sink, topic] = written.get((sink, topic), WriteResult()) + WriteResult(records_discarded=rows)
        return written

    def edges(self) -> dict[str, Json]:
        """Where its ranges end and begin, as markers keep it."""
        ends: dict[str, Json] = {source: span.end for source, span in self.ranges.items()}
        ends[ABOUT] = {"start": {source: span.start for source, span in self.ranges.items()}}
        return ends

    def held_before(self) -> list[tuple[str, Topic, str, int]]:
        """
        The last epoch of every target before this one, as markers keep it: sink, topic, incarnation, number; 0 for none.

        The targets that it writes, and that hold the epoch just before it, are left out: mostly these are all there are.
        """
        written = {(sink, topic) for sink, topics in self.rows_out.items() for topic in topics}
        known = {(sink, topic): one for sink, topics in self.held.items() for topic, one in topics.items()}
        just_before = {pair for pair in written if known.get(pair) == ("", self.number - 1)}
        listed = {**dict.fromkeys(written, ("", 0)), **known}
        return [(*pair, *one) for pair, one in sorted(listed.items()) if pair not in just_before]


class Identity(BaseModel):
    """`pipeline.json`: whose state this is."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    pipeline: str
    incarnation: str
    adopts: list[tuple[str, int]] = []
    """Markers in targets that this incarnation takes over."""
    replaces: list[tuple[str, int]] = []
    """Incarnations that this one follows, each with its last epoch: their markers are adopted when they are met."""
    resumes: Manifest | None = None
    """The first epoch of an incarnation that goes on from a lost state, until it is in a file of its own."""
    shape: Json = None
    """What the pipeline looked like, to tell which changes of its file are safe."""
