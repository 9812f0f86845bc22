"""What the targets say about the state: markers that it does not know, and epochs that a target no longer holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal
from uuid import uuid4

from penstock.errors import ConnectorError, FatalError
from penstock.runtime.epochs.manifest import Manifest, Range
from penstock.runtime.epochs.state import State
from penstock.runtime.epochs.wiring import Pair, Wiring
from penstock.sink import ABOUT, CommittedEpoch, Topic

OnLost = Literal["stop", "resume", "start-over"]

_PUT_BACK = "put the target back as it was; or read everything again with `penstock offsets reset FILE`"

_ANY = 2**63 - 1
"""Stands for the last epoch of an incarnation that was ended without knowing it."""


class Markers:
    """Compares the state with the markers in the targets."""

    def __init__(self, state: State, wiring: Wiring) -> None:
        self._state = state
        self._wiring = wiring
        self.checked: set[Pair] = set()
        """Targets whose marker was looked at."""

    def start(self, pairs: Iterable[Pair], on_lost: OnLost) -> None:
        """At every start: refuse, or take over, what this state does not know, and miss what it does."""
        newest = self._state.newest
        self._check_kept()
        foreign = {pair: marker for pair in pairs if (marker := self._foreign(*pair))}
        if foreign:
            self._take_over(foreign, on_lost)
        elif newest is not None and newest.state == "committed":
            self._check_targets(newest)

    def check(self, rows_out: Mapping[str, Mapping[Topic, object]]) -> None:
        """Refuse to commit to a target that was not known at the start and holds another run's epoch."""
        pairs = ((sink, topic) for sink, topics in rows_out.items() for topic in topics)
        foreign = {
            pair: marker for pair in pairs if pair not in self.checked and (marker := self._foreign(*pair)) is not None
        }
        if foreign:
            self._take_over(foreign, "stop")

    def remember(self, manifest: Manifest) -> None:
        """Record what was committed to for the first time, before the manifest says so."""
        known = self._state.identity.topics
        added = {
            name: [*known.get(name, []), *new]
            for name, topics in manifest.rows_out.items()
            if self._wiring.sinks[name].capabilities.exactly_once
            and (new := sorted(set(topics).difference(known.get(name, ()))))
        }
        if added:
            self._state.save_identity(topics={**known, **added})

    def holds(self, sink: str, topic: Topic, manifest: Manifest) -> bool:
        """True if the target has this very epoch."""
        marker = self._wiring.sinks[sink].committed_epoch(self._state.pipeline, topic)
        return marker is not None and (marker.incarnation, marker.number) == (manifest.incarnation, manifest.number)

    def _foreign(self, sink: str, topic: Topic) -> CommittedEpoch | None:
        """The marker of a topic if it is not one that this state knows."""
        try:
            marker = self._wiring.sinks[sink].committed_epoch(self._state.pipeline, topic)
        except ConnectorError as error:
            if not self._wiring.is_told_later(error):
                raise
            return None
        self.checked.add((sink, topic))
        if marker is None:
            return None
        identity, newest = self._state.identity, self._state.newest
        if marker.incarnation == identity.incarnation:
            known = 0 if newest is None else newest.number - (newest.state == "planned")
            return marker if marker.number > known else None
        pair = (marker.incarnation, marker.number)
        if pair in {tuple(adopted) for adopted in identity.adopts}:
            return None
        if any(marker.incarnation == old and marker.number <= last for old, last in identity.replaces):
            self._state.save_identity(adopts=[*identity.adopts, pair])
            return None
        return marker

    def _take_over(self, foreign: dict[Pair, CommittedEpoch], on_lost: OnLost) -> None:
        (sink, topic), one = max(foreign.items(), key=lambda item: item[1].number)
        if on_lost == "stop" or self._state.newest is not None:
            raise FatalError(
                f"sink {sink!r} already holds epoch {one.number} of {topic} from incarnation {one.incarnation}, "
                f"which {self._state.directory} knows nothing of: was the state directory deleted or put back from a copy?",
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

    def _resume(self, foreign: dict[Pair, CommittedEpoch]) -> None:
        """Go on from the last epoch in the targets: in a new incarnation, whose first epoch completes that one."""
        one = _newest(foreign.values())
        about = one.end.get(ABOUT) or {}
        # Every epoch before `one` was committed everywhere. Of `one` itself some topics may be missing.
        markers, missing = {(each.incarnation, each.number) for each in foreign.values()}, []
        for name, written in about.get("topics", {}).items():
            for each in (
                written if name in self._wiring.sinks else ()
            ):  # one without markers gets it again: at least once
                marker = self._wiring.sinks[name].committed_epoch(self._state.pipeline, each)
                if marker is not None:
                    markers.add((marker.incarnation, marker.number))
                if marker is None or (marker.incarnation, marker.number) != (one.incarnation, one.number):
                    missing.append((name, each))
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
        )
        # One write for all: an incarnation that adopts the markers and does not go on from them would double everything.
        replaces = [*((old, last) for old, last in about.get("replaces", ())), (one.incarnation, one.number)]
        held: dict[str, list[Topic]] = {}
        for name, topic in sorted(foreign):
            held.setdefault(name, []).append(topic)
        self._state.save_identity(adopts=sorted(markers), replaces=replaces, resumes=manifest, topics=held)
        self._state.save(manifest)

    def _check_kept(self) -> None:
        """A target that was committed to holds something, wherever a crash has left the epoch in hand."""
        for name, topics in self._state.identity.topics.items():
            for topic in topics if name in self._wiring.sinks else ():
                if self._wiring.sinks[name].committed_epoch(self._state.pipeline, topic) is None:
                    raise FatalError(
                        f"sink {name!r} holds nothing of {topic}, to which epochs were committed: the target was dropped",
                        code="PEN-5010",
                        hint=_PUT_BACK,
                    )

    def _check_targets(self, newest: Manifest) -> None:
        """A target that no longer holds the last committed epoch has lost rows; going on would hide it."""
        sinks = self._wiring.sinks
        for name, topics in newest.rows_out.items():
            for topic in topics if name in sinks and sinks[name].capabilities.exactly_once else ():
                marker = sinks[name].committed_epoch(self._state.pipeline, topic)
                if marker is None or (marker.incarnation, marker.number) != (newest.incarnation, newest.number):
                    found = "nothing" if marker is None else f"epoch {marker.number}"
                    raise FatalError(
                        f"epoch {newest.number} of {topic} is committed, and sink {name!r} holds {found}: "
                        "the target was dropped or put back from a copy",
                        code="PEN-5010",
                        hint=_PUT_BACK,
                    )


def _newest(markers: Iterable[CommittedEpoch]) -> CommittedEpoch:
    """The last epoch of the incarnation that all others came before; refuses markers that do not tell which it is."""
    found = list(markers)
    last = {tuple(each) for marker in found for each in (marker.end.get(ABOUT) or {}).get("replaces", ())}
    leading = [marker for marker in found if all(marker.incarnation != incarnation for incarnation, _ in last)]
    one = max(leading, key=lambda marker: marker.number, default=None)
    if one is not None:
        before = {one.incarnation: one.number, **dict((one.end.get(ABOUT) or {}).get("replaces", ()))}
        if all(marker.number <= before.get(marker.incarnation, -1) for marker in found):
            return one
    raise FatalError(
        "the targets hold epochs of more than one incarnation, and none of them tells which came last",
        code="PEN-5007",
        hint="another pipeline of this name writes there as well: empty the targets, and `--lost-state start-over`",
    )
