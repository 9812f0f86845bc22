"""What an epoch knows of messages: the versions and columns they are decoded by, and what becomes of messages that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from penstock.errors import DataError
from penstock.runtime.epochs.manifest import Manifest, Recent
from penstock.runtime.epochs.stage import Staged
from penstock.runtime.job import OnErrors
from penstock.runtime.messages.codecs import Codecs
from penstock.runtime.messages.decoding import Decoders, merged
from penstock.runtime.messages.pinning import doubled, pin
from penstock.schema.codec import pack_schema, unpack_schema
from penstock.sink import Topic

WINDOW = 1000
"""Records, at least, over which the share of bad ones is looked at: one bad record of two is no reason to stop."""

SMALL = 100
"""Records up to which epochs that follow each other are counted as one."""

CanBeDouble = Callable[[Topic, pa.Schema, pa.Schema, str], bool]
"""Asks the targets of a topic whether whole numbers in a known column can become doubles, as the wider columns want it."""


class Messages:
    """On the driver. Versions and columns are part of the manifest, so a range that is read again gives the same rows."""

    def __init__(
        self,
        codecs: Codecs | None = None,
        on_error: OnErrors | None = None,
        letters: str | None = None,
        max_error_rate: float = 1.0,
    ) -> None:
        """`letters`: name of the sink that takes dead letters."""
        self.on_error = on_error or OnErrors()
        self.letters = letters
        self._codecs = codecs
        self._max_error_rate = max_error_rate
        self._pinned: dict[Topic, list[str]] = {}
        """Found out in this run: the next one asks the targets once more."""

    def plan(self, newest: Manifest | None) -> dict[str, Any]:
        """What a new manifest says of messages."""
        recent = {"recent": newest.recent if newest else None}
        if not self._codecs:
            return recent
        return recent | {
            "versions": self._codecs.choose(),
            "columns": newest.columns if newest else {},
            "pinned": dict(self._pinned),
        }

    def versions_now(self) -> dict[str, int]:
        """The versions that an epoch would have if it were planned now."""
        return self._codecs.choose() if self._codecs else {}

    def file_versions(self) -> dict[str, int]:
        """The versions that the schema files of the pipeline are."""
        return self._codecs.file_versions() if self._codecs else {}

    def decoders(self, manifest: Manifest) -> Decoders:
        """What the tasks of an epoch decode with."""
        if not self._codecs:
            return Decoders()
        columns = {topic: unpack_schema(text) for topic, text in manifest.columns.items()}
        return self._codecs.decoders(manifest.versions, columns, manifest.pinned)

    def decoders_now(self, newest: Manifest | None) -> Decoders:
        """What the next epoch would decode with, as far as is known before it is planned."""
        if not self._codecs:
            return Decoders()
        columns = {topic: unpack_schema(text) for topic, text in (newest.columns if newest else {}).items()}
        return self._codecs.decoders(self._codecs.choose(), columns)

    def learned(
        self, manifest: Manifest, found: dict[Topic, list[pa.Schema]], can_be_double: CanBeDouble
    ) -> dict[str, Any]:
        """
        What changes in the manifest after tasks have met columns that the epoch did not know; empty: it knew them all.

        Whole numbers that are committed become doubles if every target of their topic can follow.
        """
        columns, pinned = dict(manifest.columns), dict(manifest.pinned)
        for topic, schemas in found.items():
            known = unpack_schema(columns[topic]) if topic in columns else None
            wider = merged(known, schemas)
            if known is not None and wider is not None:
                stay = [name for name in doubled(known, wider) if not can_be_double(topic, known, wider, name)]
                if stay:
                    pinned[topic] = self._pinned[topic] = sorted({*pinned.get(topic, ()), *stay})
                wider = pin(wider, known, pinned.get(topic, ()))
            if wider is not None and wider != known:
                columns[topic] = pack_schema(wider)
        if columns == manifest.columns and pinned == manifest.pinned:
            return {}
        return {"columns": columns, "pinned": pinned}

    def check(self, manifest: Manifest, staged: Staged) -> Recent:
        """
        Stop before an epoch that leaves too many records out, instead of draining a topic into the dead letters.

        Gives what the manifest keeps of it: the next run, too, looks at the records of this one.
        """
        epochs = _slid([*self._before(manifest), (staged.bad, max(staged.read, staged.bad))])
        bad, total = (sum(counts) for counts in zip(*epochs, strict=True))
        if staged.bad and total >= WINDOW and bad > self._max_error_rate * total:
            shown = "".join(f"\n  {each.stream}: {each.reason} ({each.rule})" for each in staged.samples)
            raise DataError(
                f"{bad:,} of the last {total:,} records, up to epoch {manifest.number}, cannot be used{shown}",
                code="PEN-3002",
                hint="correct the schema file, and start again; or raise `max_error_rate`, the share at which the pipeline "
                "stops, and replay the dead letters after the fix",
            )
        return Recent(limit=self._max_error_rate, epochs=epochs)

    def _before(self, manifest: Manifest) -> list[tuple[int, int]]:
        """The epochs that count with this one. Someone who changed the limit has seen what came before."""
        recent = manifest.recent
        return recent.epochs if recent is not None and recent.limit == self._max_error_rate else []


def _slid(epochs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The last of them, as far as the window reaches; small neighbours are added up, so that a manifest stays small."""
    kept: list[tuple[int, int]] = []
    for bad, total in epochs:
        if kept and kept[-1][1] + total <= SMALL:
            kept[-1] = kept[-1][0] + bad, kept[-1][1] + total
        else:
            kept.append((bad, total))
    while len(kept) > 1 and sum(total for _, total in kept[1:]) >= WINDOW:
        del kept[0]
    return kept
