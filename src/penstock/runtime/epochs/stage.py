"""Step 2: one job of the engine that stages an epoch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock import tables
from penstock.changes import own_columns
from penstock.durable import Json
from penstock.errors import ConnectorError
from penstock.pipeline.routing import Target
from penstock.runtime.epochs.contexts import Contexts
from penstock.runtime.epochs.evolve import Followers
from penstock.runtime.epochs.manifest import Manifest, Range
from penstock.runtime.epochs.wiring import Pair
from penstock.runtime.job import SAMPLES, Bad, Engine, Job, Part, Tally, TaskResult, is_plain
from penstock.runtime.messages.clashes import Path as Column
from penstock.runtime.messages.clashes import clashing
from penstock.runtime.messages.letters import REPLAY
from penstock.schema import Choosy, key_of
from penstock.sink import Epoch, Topic, WriteResult
from penstock.source import Schemas
from penstock.tables import CopyAgain, Refused, TableSource

if TYPE_CHECKING:
    from penstock.runtime.epochs.messages import Messages


@dataclass
class Staged:
    """The sum of the tasks' results, as a manifest keeps it."""

    receipts: dict[str, list[Json]] = field(default_factory=dict)
    notes: dict[str, list[Json]] = field(default_factory=dict)
    """In the order of the parts; of a part that several topics read, what each of them has to say."""
    rows_in: dict[str, int] = field(default_factory=dict)
    rows_out: dict[str, dict[Topic, tuple[int, int]]] = field(default_factory=dict)
    """What reached each sink and topic: rows and bytes; one that nothing reached has no epoch to check."""
    discarded: dict[str, dict[Topic, int]] = field(default_factory=dict)
    skipped: int = 0
    read: int = 0
    """Records that came for the first time."""
    bad: int = 0
    """Of these, records that could not be used, skipped or kept as dead letters."""
    letters: dict[Topic, int] = field(default_factory=dict)
    """Dead letters, per topic."""
    codes: dict[str, int] = field(default_factory=dict)
    """The same by error code."""
    oldest: dict[str, float] = field(default_factory=dict)
    """When the first row of each source came to be, where its rows know it."""
    samples: list[Bad] = field(default_factory=list)
    """The first few of the bad ones."""
    columns: dict[Topic, list[pa.Schema]] = field(default_factory=dict)
    """Columns of payloads that tasks have met and the epoch does not know."""
    filled: dict[Pair, list[list[Column]]] = field(default_factory=dict)
    """Columns of messages that each sink took values of, task by task, for formats that infer them."""
    retried: bool = False
    """A task was tried again: its first try may have left files."""
    refused: dict[tuple[str, str], Json] = field(default_factory=dict)
    """Sources and streams that a sink refused in this job, with the notes that say so: parts of them may be staged."""

    @classmethod
    def of(cls, results: Sequence[TaskResult], skipped: Mapping[tuple[str, str], Json]) -> Staged:
        """`skipped`: streams that no task has read, with their notes."""
        staged = cls(retried=any(result.attempt for result in results))
        parts = _by_part(results)
        staged._count(parts)
        staged._note(parts, skipped)
        for result in results:
            for pair, note in result.refused.items():
                staged.refused.setdefault(pair, note)
            for topic, columns in result.columns.items():
                staged.columns.setdefault(topic, []).append(columns)
            for target, filled in result.filled.items():
                staged.filled.setdefault(target, []).append(filled)
            staged.samples += [each for each in result.samples if each not in staged.samples]
        staged.samples = staged.samples[: 2 * SAMPLES]
        total: dict[tuple[str, Topic], WriteResult] = {}
        for result in results:
            for name, receipt in result.receipts.items():
                staged.receipts.setdefault(name, []).append(receipt.model_dump(mode="json"))
            for pair, one in result.written.items():
                total[pair] = total.get(pair, WriteResult()) + one
        for (sink, topic), one in total.items():
            if one.records_written:
                staged.rows_out.setdefault(sink, {})[topic] = (one.records_written, one.bytes_written)
            if one.records_discarded:
                staged.discarded.setdefault(sink, {})[topic] = one.records_discarded
        return staged

    def _count(self, tallies: Mapping[int, Tally]) -> None:
        for tally in tallies.values():
            self.rows_in[tally.source] = self.rows_in.get(tally.source, 0) + tally.rows
            skipped = sum(tally.skipped.values())
            self.skipped += skipped + tally.unrouted
            if tally.source != REPLAY:  # those are known to be bad
                self.read += tally.rows
                self.bad += skipped + sum(tally.letters.values())
            self.samples += tally.samples[: SAMPLES - len(self.samples)]
            for topic, count in tally.letters.items():
                self.letters[topic] = self.letters.get(topic, 0) + count
            for code, count in tally.codes.items():
                self.codes[code] = self.codes.get(code, 0) + count
            if tally.oldest is not None:
                self.oldest[tally.source] = min(tally.oldest, self.oldest.get(tally.source, tally.oldest))

    def _note(self, parts: Mapping[int, Tally], skipped: Mapping[tuple[str, str], Json]) -> None:
        for (source, _), note in skipped.items():
            self.notes.setdefault(source, []).append(note)
        for _, tally in sorted(parts.items()):
            self.notes.setdefault(tally.source, []).extend(tally.notes)
            for stream, note in tally.refused.items():
                self.refused.setdefault((tally.source, stream), note)


def _by_part(results: Sequence[TaskResult]) -> dict[int, Tally]:
    """What became of each part, over all tasks that had to do with it."""
    parts: dict[int, Tally] = {}
    for result in results:
        for number, tally in result.tallies.items():
            if number in parts:
                parts[number].add(tally)
            else:
                parts[number] = tally
    return parts


@dataclass
class Wanted:
    """What a job stages of an epoch."""

    sinks: Sequence[str]
    only: Sequence[Pair] | None = None
    """These of their topics; None: all."""
    without: frozenset[Pair] = frozenset()
    """Not these."""
    left_out: dict[tuple[str, str], Json] = field(default_factory=dict)
    """Nothing of these sources and streams, with the notes that say so."""


class Stager:
    """Runs the jobs that stage."""

    def __init__(self, contexts: Contexts, engine: Engine, messages: Messages) -> None:
        self._wiring = contexts.wiring
        self._contexts = contexts
        self._engine = engine
        self._messages = messages
        self._followers = Followers(contexts)
        self._together: dict[Pair, set[Column]] = {}
        """What each target was seen to have a place for."""

    @property
    def letters(self) -> str | None:
        """Name of the sink that takes dead letters."""
        return self._messages.letters

    def run(self, manifest: Manifest, epoch: Epoch, wanted: Wanted) -> Staged:
        """Stage what is wanted of the epoch."""
        parts: list[Part] = []
        schemas: dict[str, Schemas] = {}
        cleared: set[tuple[str, str]] = set()
        for name, span in manifest.ranges.items():
            source = self._wiring.sources[name]
            start, end = (source.position_type.model_validate(edge) for edge in (span.start, span.end))
            if start != end:
                parts += [Part(len(parts) + i, name, split) for i, split in enumerate(source.split(start, end))]
                schemas[name] = source.schema()
                if isinstance(source, TableSource):
                    refilled = tables.refilled(source.tables(start), source.tables(end))
                    cleared |= {(name, stream) for stream in refilled}
        if REPLAY in schemas:  # letters are of any stream
            schemas |= {name: source.schema() for name, source in self._wiring.sources.items() if name not in schemas}
        decoders = self._messages.decoders(manifest)
        following = self._followers.follow(schemas, manifest, cleared, decoders, self._messages.on_error)
        skipped = {**wanted.left_out, **following.skipped}
        job = Job(
            epoch=epoch,
            parts=parts,
            sources={name: self._wiring.fresh_source(name) for name in schemas},
            sinks={name: self._wiring.fresh_sink(name) for name in wanted.sinks},
            router=self._wiring.router,
            schemas={
                n: {s: each for s, each in found.items() if (n, s) not in skipped} for n, found in schemas.items()
            },
            on_error=self._messages.on_error,
            letters=self._messages.letters,
            decoders=decoders,
            only=None if wanted.only is None else frozenset((sink, topic) for sink, topic in wanted.only),
            without=wanted.without,
            barred={(n, topic): paths for n, topics in manifest.barred.items() for topic, paths in topics.items()},
            aside=frozenset(skipped),
            contexts=self._contexts.in_tasks(self._engine.is_local, following.renewed),
        )
        unknown = _unknown(job)
        if unknown and parts:
            looked = Staged.of(self._engine.run(replace(job, only=frozenset(), look=unknown)), skipped)
            if looked.columns:
                return looked
        return Staged.of(self._engine.run(replace(job, look=unknown)) if parts else (), skipped)

    def learned(self, manifest: Manifest, staged: Staged) -> dict[str, Any]:
        """What the manifest says of payloads, now that tasks have met columns that it did not know; empty: it knew them all."""
        return self._messages.learned(manifest, staged.columns, self._followers.can_be_double)

    def barred(self, manifest: Manifest, staged: Staged) -> dict[str, Any]:
        """What the manifest says of columns that tasks took each for itself and a target cannot have; empty: all fit."""
        decoders = self._messages.decoders(manifest)
        found = {name: dict(topics) for name, topics in manifest.barred.items()}
        for (name, topic), tasks in staged.filled.items():
            sink, decoder, every = (
                self._wiring.sinks[name],
                decoders.of(topic),
                {each for paths in tasks for each in paths},
            )
            schema = decoder.schema() if decoder is not None else None
            is_asked = len(tasks) > 1 and not self._together.get((name, topic), set()).issuperset(every)
            if not is_asked or schema is None or not isinstance(sink, Choosy):
                continue
            always = {*schema.names}.difference(own_columns(schema)).union(key_of(schema))
            clashes = clashing(partial(sink.check_columns, topic), schema, tasks, always)
            if clashes:
                found.setdefault(name, {})[topic] = [*found.get(name, {}).get(topic, []), *clashes]
            else:
                self._together[name, topic] = every
        return {"barred": found} if found != manifest.barred else {}

    def refusals(self, pairs: Collection[Pair], error: ConnectorError) -> dict[tuple[str, str], Json]:
        """The tables that go to these targets, with the notes that have them copied again."""
        return {
            (name, stream): Refused.because(stream, error).note()
            for name, source in self._wiring.sources.items()
            if isinstance(source, TableSource)
            for stream in source.schema()
            if not set(pairs).isdisjoint(self._wiring.pairs(name, stream))
        }

    def reread(self, manifest: Manifest, staged: Staged, pairs: Sequence[Pair]) -> dict[str, list[Json]]:
        """The notes of an epoch whose range was read again for these sinks and topics alone."""
        counted = dict(manifest.notes)
        for name, again in staged.notes.items():
            first, source = manifest.notes.get(name, []), self._wiring.sources[name]
            if isinstance(source, TableSource):
                streams = {s for s in source.schema() if not set(pairs).isdisjoint(self._wiring.pairs(name, s))}
                counted[name] = [*first, *_differing(source, manifest.ranges[name], again, streams)]
            else:
                counted[name] = list(first or again)
        return counted


def _unknown(job: Job) -> frozenset[Topic]:
    """
    Topics whose columns have to be known before they are staged, and are not.

    SQL is analysed against columns; and a sink that shows rows at once would show them twice, since an epoch is staged again
    when payloads turn out to have columns.
    """

    def waits(target: Target) -> bool:
        sinks = [job.sinks[name] for name in target.sinks if name in job.sinks]
        return not is_plain(target.route) or not all(sink.capabilities.two_phase_commit for sink in sinks)

    return frozenset(
        target.topic
        for source, streams in job.schemas.items()
        for stream, schema in streams.items()
        for target in job.router.targets(source, stream)
        if waits(target) and job.decoders.schema(target.topic, schema) is None
    )


def _differing(source: TableSource[Any, Any], span: Range, again: Sequence[Json], streams: set[str]) -> Iterator[Json]:
    """
    What is to be noted of tables that were staged a second time, for some sinks alone.

    A copy that is read twice may hold other rows the second time: so that all sinks get the same, it is made once more. A
    table that was refused this time is missing in one sink.
    """
    start, end = (source.position_type.model_validate(edge) for edge in (span.start, span.end))
    copied = tables.copied(source.tables(start), source.tables(source.next_start(end, again))) & streams
    if copied:
        yield CopyAgain(streams=tuple(sorted(copied))).note()
    yield from (note for note in again if (refused := Refused.read(note)) and refused.stream in streams)
