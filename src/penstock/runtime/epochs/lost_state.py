"""What the targets say about the state: markers that it does not know, and epochs that a target no longer holds."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal
from uuid import uuid4

from penstock.errors import ConnectorError, FatalError, Fenced
from penstock.runtime.epochs.manifest import Held, Manifest, Range
from penstock.runtime.epochs.state import State
from penstock.runtime.epochs.wiring import Pair, Wiring
from penstock.sink import ABOUT, CommittedEpoch, Topic, is_committed, same_ranges

OnLost = Literal["stop", "resume", "start-over"]

THREADS = 8
"""Targets that are asked at the same time."""

_MANY = 16
"""From so many targets on it is worth a thread."""

_ANY = 2**63 - 1
"""The last epoch of an incarnation that was ended, when its number is not known."""


class Markers:
    """Compares the state with the markers in the targets."""

    def __init__(self, state: State, wiring: Wiring) -> None:
        self._state = state
        self._wiring = wiring
        self.checked: set[Pair] = set()
        """Targets whose marker was looked at."""

    def start(self, pairs: Iterable[Pair], on_lost: OnLost) -> None:
        """At every start: miss what a target has lost, and refuse, or take over, what this state does not know."""
        held = {
            (sink, topic) for sink, topics in self._held().items() for topic in topics if sink in self._wiring.sinks
        }
        markers = self._ask({*pairs, *held})
        for pair in sorted(held & markers.keys()):
            self._check_held(pair, markers[pair])
        self._refuse_other_runs(markers)
        foreign = {pair: marker for pair, marker in markers.items() if marker and self._is_foreign(pair, marker)}
        if foreign:
            self._take_over(foreign, on_lost)

    def check(self, rows_out: Mapping[str, Mapping[Topic, object]]) -> None:
        """
        Refuse to commit to a target that was not known at the start and holds another run's epoch.

        And to one that the last epoch did not write to: since then another run may have. To the others it cannot: it would
        have been fenced.
        """
        written = {(sink, topic) for sink, topics in rows_out.items() for topic in topics}
        last = self._state.newest.number - 1 if self._state.newest else 0
        idle = {(sink, topic) for sink, topic in written if self._held().get(sink, {}).get(topic, ("", 0))[1] < last}
        self._refuse_other_runs(self._ask({pair for pair in idle & self.checked if self._has_marker(pair)}))
        markers = self._ask(written - self.checked)
        foreign = {pair: marker for pair, marker in markers.items() if marker and self._is_foreign(pair, marker)}
        if foreign:
            self._take_over(foreign, "stop")

    def after(self, manifest: Manifest) -> Held:
        """The last epoch of every target once this one is committed."""
        held = {name: dict(topics) for name, topics in manifest.held.items()}
        for name, topics in manifest.rows_out.items():
            if self._wiring.sinks[name].capabilities.exactly_once:
                held.setdefault(name, {}).update(dict.fromkeys(topics, ("", manifest.number)))
        return held

    def holds(self, sink: str, topic: Topic, manifest: Manifest) -> bool:
        """True if the target has this very epoch; `Fenced` if it has that of another run under its number."""
        marker = self._wiring.sinks[sink].committed_epoch(self._state.pipeline, topic)
        if marker is None or (marker.incarnation, marker.number) != (manifest.incarnation, manifest.number):
            return False
        return is_committed(marker, self._state.epoch(manifest))

    def _held(self) -> Held:
        return self._state.newest.held if self._state.newest else {}

    def _ask(self, pairs: Collection[Pair]) -> dict[Pair, CommittedEpoch | None]:
        """The marker of each target, at the same time where the sinks allow it; not of topics that have no place."""

        def ask(pair: Pair) -> tuple[Pair, CommittedEpoch | None] | None:
            try:
                return pair, self._wiring.sinks[pair[0]].committed_epoch(self._state.pipeline, pair[1])
            except ConnectorError as error:
                if not self._wiring.is_told_later(error):
                    raise
                return None

        ordered = sorted(pairs)
        beside = [pair for pair in ordered if self._wiring.sinks[pair[0]].concurrent]
        alone = [pair for pair in ordered if not self._wiring.sinks[pair[0]].concurrent]
        if len(beside) < _MANY:
            alone, beside = ordered, []
        with ThreadPoolExecutor(THREADS, "penstock-ask") if beside else contextlib.nullcontext() as pool:
            answers = [*(map(ask, alone)), *(pool.map(ask, beside) if pool else ())]
        found = dict(answer for answer in answers if answer is not None)
        self.checked |= found.keys()
        return found

    def _check_held(self, pair: Pair, marker: CommittedEpoch | None) -> None:
        """A target that no longer holds the last epoch committed to it has lost rows; going on would hide it."""
        sink, topic = pair
        incarnation, number = self._held()[sink][topic]
        identity = self._state.identity
        if marker is None:
            raise FatalError(
                f"sink {sink!r} holds nothing of {topic}, to which epoch {number} was committed: the target was dropped",
                code="PEN-5010",
                hint=_way_on(topic),
            )
        mine = incarnation or identity.incarnation
        older = marker.incarnation == mine and marker.number < number
        if older or (marker.incarnation != mine and any(marker.incarnation == old for old, _ in identity.replaces)):
            raise FatalError(
                f"epoch {number} of {topic} is committed, and sink {sink!r} holds epoch {marker.number}"
                + ("" if older else " of an earlier incarnation")
                + ": the target was restored from an older backup",
                code="PEN-5010",
                hint=_way_on(topic),
            )

    def _has_marker(self, pair: Pair) -> bool:
        return pair[0] in self._wiring.sinks and self._wiring.sinks[pair[0]].capabilities.exactly_once

    def _refuse_other_runs(self, markers: Mapping[Pair, CommittedEpoch | None]) -> None:
        """
        Refuse an epoch of this incarnation that was committed with other ranges than ours of the number.

        A run on a copy of the state directory is fenced by the first target that holds our epoch; to one that our epoch had
        no rows for it may have committed before.
        """
        identity, own = self._state.identity, dict[int, Manifest | None]()
        for (sink, topic), marker in sorted(markers.items()):
            if marker is None or marker.incarnation != identity.incarnation or self._state.newest is None:
                continue
            if marker.number not in own:
                newest = self._state.newest
                own[marker.number] = newest if marker.number == newest.number else self._state.load(marker.number)
            manifest = own[marker.number]
            is_ours = manifest is None or manifest.state != "committed" or same_ranges(marker.end, manifest.edges())
            if not is_ours:
                raise Fenced(
                    f"sink {sink!r} holds an epoch {marker.number} of {topic} of other ranges than this run has committed: "
                    "another run, on a copy of the state directory, wrote it before it was stopped",
                    hint="restore the target as it was before that; or delete it, `penstock offsets forget FILE "
                    f"{topic}`, and have a captured table copied again: `penstock tables resync`",
                )

    def _is_foreign(self, pair: Pair, marker: CommittedEpoch) -> bool:
        """True if the marker is not one that this state knows."""
        identity, newest = self._state.identity, self._state.newest
        if marker.incarnation == identity.incarnation:
            known = 0 if newest is None else newest.number - (newest.state == "planned")
            return marker.number > known
        one = (marker.incarnation, marker.number)
        if one in {tuple(adopted) for adopted in identity.adopts}:
            return False
        if any(marker.incarnation == old and marker.number <= last for old, last in identity.replaces):
            self._state.save_identity(adopts=[*identity.adopts, one])
            return False
        return True

    def _take_over(self, foreign: dict[Pair, CommittedEpoch], on_lost: OnLost) -> None:
        (sink, topic), one = max(foreign.items(), key=lambda item: item[1].number)
        if on_lost == "stop" or self._state.newest is not None:
            raise FatalError(
                f"sink {sink!r} already holds epoch {one.number} of {topic} from incarnation {one.incarnation}, "
                f"which {self._state.directory} knows nothing of: was the state directory deleted, or restored from a backup?",
                code="PEN-5007",
                hint="`penstock run FILE --lost-state resume` goes on from the end that the target records; "
                "`--lost-state start-over` reads everything again (empty the target first, or its rows will be doubled)"
                + ("; move this state directory away first" if self._state.newest is not None else ""),
            )
        if on_lost == "resume":
            self._resume(foreign)
            return
        markers = {(marker.incarnation, marker.number) for marker in foreign.values()}
        ended = [(incarnation, _ANY) for incarnation in sorted({incarnation for incarnation, _ in markers})]
        identity = self._state.identity
        self._state.save_identity(adopts=[*identity.adopts, *sorted(markers)], replaces=[*identity.replaces, *ended])

    def _refuse_older(self, one: CommittedEpoch) -> None:
        """Refuse to go on from the newest epoch while a target lacks one that was committed to it before."""
        for (name, topic), (incarnation, number) in sorted(_held_before(one).items()):
            sink = self._wiring.sinks.get(name)
            if sink is None or not sink.capabilities.exactly_once:
                continue
            found = sink.committed_epoch(self._state.pipeline, topic)
            is_later = found is not None and found.incarnation == one.incarnation != incarnation
            if not is_later and (found is None or found.incarnation != incarnation or found.number < number):
                held = f"epoch {found.number}" if found is not None else "nothing"
                raise FatalError(
                    f"sink {name!r} holds {held} of {topic}, to which epoch {number} was committed before the state was lost: "
                    "the target was dropped, or restored from an older backup than the others",
                    code="PEN-5010",
                    hint="restore all targets as they were at one moment; or empty them, and `--lost-state start-over`",
                )

    def _resume(self, foreign: dict[Pair, CommittedEpoch]) -> None:
        """Go on from the last epoch in the targets: in a new incarnation, whose first epoch completes that one."""
        one = _newest(foreign.values())
        about = one.end.get(ABOUT) or {}
        self._refuse_older(one)
        # Every epoch before `one` was committed everywhere. Of `one` itself some topics may be missing.
        markers, missing = {(each.incarnation, each.number) for each in foreign.values()}, []
        for name, written in about.get("topics", {}).items():
            for each in (
                written if name in self._wiring.sinks else ()
            ):  # one without markers gets it again: at least once
                found = self._wiring.sinks[name].committed_epoch(self._state.pipeline, each)
                if found is not None:
                    markers.add((found.incarnation, found.number))
                    _refuse_others(one, [found])
                if found is None or (found.incarnation, found.number) != (one.incarnation, one.number):
                    missing.append((name, each))
        held: Held = {}
        for (name, topic), marker in sorted(foreign.items(), key=lambda item: item[0]):
            if self._wiring.sinks[name].capabilities.exactly_once:
                held.setdefault(name, {})[topic] = (marker.incarnation, marker.number)
        ranges = {
            name: Range(start=about["start"][name] if missing else end, end=end)
            for name, end in one.end.items()
            if name in self._wiring.sources
        }
        manifest = Manifest(
            pipeline=self._state.pipeline,
            incarnation=self._state.identity.incarnation,
            number=1,
            state="planned" if missing else "committed",
            ranges=ranges,
            attempts=[uuid4().hex[:8]],
            only=missing or None,
            notes=about.get("notes", {}),
            held=held,
        )
        # One write for all: an incarnation that adopts the markers and does not go on from them would double everything.
        replaces = [*((old, last) for old, last in about.get("replaces", ())), (one.incarnation, one.number)]
        self._state.save_identity(adopts=sorted(markers), replaces=replaces, resumes=manifest)
        self._state.save(manifest)


def _way_on(topic: Topic) -> str:
    return (
        "restore the target from its newest backup, or read everything again with `penstock offsets reset FILE`; if the rows "
        f"are not to be missed, or are to be copied again (`penstock tables resync`), `penstock offsets forget FILE {topic}`"
    )


def _held_before(one: CommittedEpoch) -> dict[Pair, tuple[str, int]]:
    """What `Manifest.held_before` has left in a marker, with what it leaves out; empty for markers of earlier versions."""
    about = one.end.get(ABOUT) or {}
    if "held" not in about:
        return {}
    written = {(sink, topic) for sink, topics in about["topics"].items() for topic in topics}
    listed = {(sink, topic): (of or one.incarnation, number) for sink, topic, of, number in about["held"]}
    held = {**dict.fromkeys(written, (one.incarnation, one.number - 1)), **listed}
    return {pair: epoch for pair, epoch in held.items() if epoch[1]}


def _newest(markers: Iterable[CommittedEpoch]) -> CommittedEpoch:
    """The last epoch of the incarnation that all others came before; refuses markers that do not tell which it is."""
    found = list(markers)
    last = {tuple(each) for marker in found for each in (marker.end.get(ABOUT) or {}).get("replaces", ())}
    leading = [marker for marker in found if all(marker.incarnation != incarnation for incarnation, _ in last)]
    one = max(leading, key=lambda marker: marker.number, default=None)
    if one is not None:
        before = {one.incarnation: one.number, **dict((one.end.get(ABOUT) or {}).get("replaces", ()))}
        if all(marker.number <= before.get(marker.incarnation, -1) for marker in found):
            _refuse_others(one, found)
            return one
    raise FatalError(
        "the targets hold epochs of more than one incarnation, and none of them tells which came last",
        code="PEN-5007",
        hint="another pipeline of this name writes there as well: empty the targets, and `--lost-state start-over`",
    )


def _refuse_others(one: CommittedEpoch, found: Iterable[CommittedEpoch]) -> None:
    """Refuse markers of two epochs under one number: of neither can be said what the other's topics lack."""
    for marker in found:
        is_twin = (marker.incarnation, marker.number) == (one.incarnation, one.number)
        if is_twin and not same_ranges(one.end, marker.end):
            raise FatalError(
                f"some targets hold an epoch {one.number} of other ranges than the others do: two runs on copies of one state "
                "directory have each committed theirs",
                code="PEN-5007",
                hint="go on with the state directory of the run that you keep, once the targets that hold the other run's epoch "
                "are put back to before it; or empty the targets, and `--lost-state start-over`",
            )
