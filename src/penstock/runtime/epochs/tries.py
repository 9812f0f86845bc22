"""Tries at staging an epoch: each has a name, and what it staged counts only once a manifest says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from penstock import failpoints
from penstock.errors import DataError, FatalError
from penstock.runtime.epochs.lost_state import Markers
from penstock.runtime.epochs.manifest import Manifest
from penstock.runtime.epochs.stage import Staged, Stager, Wanted
from penstock.runtime.epochs.state import State
from penstock.runtime.epochs.sweep import Sweeper
from penstock.runtime.epochs.wiring import Wiring


class Tries:
    def __init__(
        self,
        state: State,
        wiring: Wiring,
        markers: Markers,
        stager: Stager,
        sweeper: Sweeper,
        on_phase: Callable[[int, str], None],
    ) -> None:
        self._state = state
        self._sinks = wiring.sinks
        self._markers = markers
        self._stager = stager
        self._sweeper = sweeper
        self._on_phase = on_phase

    def run(self, manifest: Manifest, wanted: Wanted) -> tuple[Manifest, Staged]:
        """
        Stage, and stage again without the tables that a sink refuses, each of which is in an epoch whole or not at all; or
        with columns that payloads turned out to have, so that all rows of an epoch have the same; or without those that
        tasks took each for itself, and that a target cannot have together.
        """
        while True:
            self._on_phase(manifest.number, "stage")
            staged = self._stager.run(manifest, self._state.epoch(manifest), wanted)
            learned = self._stager.learned(manifest, staged) or self._stager.barred(manifest, staged)
            if not learned and not staged.refused:
                return manifest, staged
            wanted.left_out |= staged.refused
            self._sweeper.abandon()
            manifest = self.name(manifest, **learned)

    def roll_back(self, manifest: Manifest) -> Manifest:
        """Remove what earlier tries staged, and name the next one before it begins."""
        self._sweeper.abandon()
        for name, topic in sorted(self._markers.checked):
            if self._markers.holds(name, topic, manifest):
                raise FatalError(
                    f"{topic} in sink {name!r} holds epoch {manifest.number}, but its manifest says that nothing is committed",
                    code="PEN-5007",
                    hint=f"{self._state.directory} was restored from an older backup: move it away to be asked where to go on",
                )
        for attempt in manifest.attempts:
            for sink in self._sinks.values():
                sink.rollback_epoch(self._state.epoch(manifest, attempt), ())
        return self.name(manifest)

    def name(self, manifest: Manifest, **changed: Any) -> Manifest:
        """Name the next try before it begins."""
        unswept = sorted({*manifest.unswept, manifest.number})
        attempts = [*manifest.attempts, uuid4().hex[:8]]
        return self._state.save(manifest.model_copy(update={"attempts": attempts, "unswept": unswept, **changed}))

    def again(self, manifest: Manifest, name: str) -> Manifest:
        """One sink lost what it had staged: stage the topics that it has not committed, from the range."""
        self._sweeper.abandon()
        known = manifest.rows_out.get(name, {})
        lost = [(name, topic) for topic in known if not self._markers.holds(name, topic, manifest)]
        manifest = self.name(manifest)
        wanted = Wanted([name], lost)
        if name == self._stager.letters:  # what other sinks refuse is only known by offering it to them; it is swept
            done = {(name, topic) for topic in known}.difference(lost)
            wanted = Wanted(list(self._sinks), without=frozenset(done))
        manifest, staged = self.run(manifest, wanted)
        # Topics of which nothing was staged this time: their streams were refused.
        gone = {topic for _, topic in lost} - staged.rows_out.get(name, {}).keys()
        update = {
            "rows_out": {**manifest.rows_out, name: {topic: n for topic, n in known.items() if topic not in gone}},
            "receipts": {**manifest.receipts, name: staged.receipts.get(name, [])},
            "notes": self._stager.reread(manifest, staged, lost),
            "replaced": {**manifest.replaced, name: [*manifest.replaced.get(name, []), *manifest.receipts[name]]},
        }
        return self._state.save(manifest.model_copy(update=update))

    def anew(self, manifest: Manifest) -> Manifest:
        """Stage what no target holds yet from the range, by the routes and sinks as they are now; somebody asked for it."""
        assert manifest.restage is not None
        self._sweeper.abandon()
        known = [(name, topic) for name, topics in manifest.rows_out.items() for topic in topics]
        done = {pair for pair in known if pair[0] in self._sinks and self._markers.holds(*pair, manifest)}
        dropped = {(name, topic) for topic in manifest.restage for name in self._sinks} - done
        why = DataError(f"left out of epoch {manifest.number} by `penstock offsets restage`")
        left_out = self._stager.refusals(dropped, why)
        manifest = self.name(manifest)
        manifest, staged = self.run(manifest, Wanted(list(self._sinks), None, frozenset(done | dropped), left_out))
        again = [(name, topic) for name, topics in staged.rows_out.items() for topic in topics]
        rows_out = {name: dict(topics) for name, topics in staged.rows_out.items()}
        for name, topic in done:
            rows_out.setdefault(name, {})[topic] = manifest.rows_out[name][topic]
        update = {
            "receipts": staged.receipts,
            "replaced": {
                name: [*manifest.replaced.get(name, []), *manifest.receipts.get(name, [])]
                for name in {*manifest.replaced, *manifest.receipts}
            },
            "rows_out": rows_out,
            "notes": self._stager.reread(manifest, staged, again) if done else staged.notes,
            "skipped": staged.skipped,
            "restage": None,
        }
        manifest = self._state.save(manifest.model_copy(update=update))
        failpoints.hit("prepare.after")
        return manifest
