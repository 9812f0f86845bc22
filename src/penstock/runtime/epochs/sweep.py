"""Removes what dead tries left, once none of their tasks can still write."""

from __future__ import annotations

import time

from penstock.errors import RetryableError
from penstock.runtime.epochs.manifest import Manifest
from penstock.runtime.epochs.state import State
from penstock.runtime.epochs.wiring import Wiring
from penstock.sink import TopicSink, has_second_stage

SWEEP_AFTER_SECS = 30.0
"""How long after a crash its tasks may still write: an executor notices within seconds that its driver is gone."""


class Sweeper:
    def __init__(self, state: State, wiring: Wiring) -> None:
        self._state = state
        self._wiring = wiring
        self.abandoned_at = time.monotonic()
        """When a try was last given up."""

    def abandon(self) -> None:
        """A try is given up now: its tasks may go on for a while."""
        self.abandoned_at = time.monotonic()

    def sweep(self) -> None:
        """After an epoch: sweep every epoch that may have left something."""
        newest = self._state.newest
        if newest is None or not newest.unswept or time.monotonic() - self.abandoned_at < SWEEP_AFTER_SECS:
            return
        try:
            for number in newest.unswept:
                manifest = newest if number == newest.number else self._state.load(number)
                if manifest is not None:
                    self._sweep(manifest)
        except RetryableError:
            return  # the epoch is committed, and what is left lying takes nothing but room: later
        # Not written now: the next manifest carries it, and sweeping twice does no harm.
        self._state.newest = newest.model_copy(update={"unswept": []})

    def _sweep(self, manifest: Manifest) -> None:
        for name, sink in self._wiring.sinks.items():
            named = (*manifest.receipts.get(name, ()), *manifest.replaced.get(name, ()))
            keep = [sink.receipt_type.model_validate(each) for each in named]
            for attempt in manifest.attempts:
                sink.sweep(self._state.epoch(manifest, attempt), keep)
            if isinstance(sink, TopicSink) and has_second_stage(sink):
                applied = [sink.applied_type.model_validate(each) for each in manifest.applied.get(name, ())]
                known = {each.topic for each in applied}
                for attempt in manifest.applies:
                    won = {topic for topic, winner in manifest.kept.get(name, {}).items() if winner == attempt}
                    if won <= known:  # else a run that died has committed this try, and nobody knows its files
                        sink.sweep(self._state.epoch(manifest, attempt), applied)
