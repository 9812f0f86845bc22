"""On the driver: register schema files, choose the versions that an epoch uses, and hand decoders to its tasks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from uuid import uuid4

import pyarrow as pa

from penstock.errors import ConfigError, ConnectorError, DataError
from penstock.formats import Failed, WireSchema
from penstock.formats.framing import WrongSubject
from penstock.pipeline.schemas import TopicSchema, TopicSchemas
from penstock.runtime.messages.decoding import NO_COLUMNS, Decoders, make_format
from penstock.schema.registry import Registry
from penstock.schema.registry.versions import choose, ensure_registered
from penstock.sink import Topic

REFUSED_SECS = 10.0
"""For this long a process does not ask the registry again for an id that it did not have, or not under the subject."""

MOST_REFUSED = 10_000
"""Of these ids that are remembered: bytes of a payload without a frame may pass for any."""


MOST_KEPT = 256
"""Runs and expected subjects whose schemas a process keeps: a worker of Spark may serve several."""


@dataclass
class _Met:
    """What a registry answered to a process about ids."""

    known: dict[int, WireSchema] = field(default_factory=dict)
    refused: dict[int, tuple[float, DataError]] = field(default_factory=dict)


_MET: dict[tuple[str, str | None], _Met] = {}


def _met(run: str, expected: str | None) -> _Met:
    """Of one run and subject; a task of a later epoch comes with a copy of its own, and finds what earlier ones asked for."""
    if (run, expected) not in _MET and len(_MET) >= MOST_KEPT:
        _MET.pop(next(iter(_MET)), None)
    return _MET.setdefault((run, expected), _Met())


@dataclass(frozen=True)
class Resolve:
    """Finds the writer's schema by the id in a message's frame; travels to tasks."""

    registry: Registry
    expected: str | None = None
    run: str = field(default_factory=lambda: uuid4().hex, compare=False)
    """Whose answers count: another run may have another registry at the same address."""

    def __call__(self, id: int) -> WireSchema:
        """The schema of an id, which never changes; one that is refused is not asked for again for a while."""
        met = _met(self.run, self.expected)
        if id in met.known:
            return met.known[id]
        since, refusal = met.refused.get(id, (0.0, None))
        if refusal is not None and time.monotonic() < since + REFUSED_SECS:
            raise refusal
        try:
            met.known[id] = found = self._asked(id)
        except DataError as error:
            if len(met.refused) >= MOST_REFUSED:
                met.refused.clear()
            met.refused[id] = (time.monotonic(), error.with_traceback(None))
            raise
        return found

    def _asked(self, id: int) -> WireSchema:
        schema = self.registry.fetch_schema_by_id(id)
        if self.expected is not None and self.expected not in {subject for subject, _ in self.registry.places(id)}:
            raise WrongSubject(
                f"the schema {id} is of {schema.subject or 'no subject'}, not of {self.expected}", code="PEN-3001"
            )
        return schema


class Codecs:
    """The formats of a pipeline's topics, and the registry that knows their schemas."""

    def __init__(self, schemas: TopicSchemas, state_dir: Path) -> None:
        self.schemas = schemas
        self._registry = schemas.registry.make(state_dir) if schemas else None
        self._wire: dict[tuple[str, int], WireSchema] = {}
        self._run = uuid4().hex
        self._files: dict[str, int] = {}
        """The version that each file is, by its entry."""
        self._last: tuple[dict[str, int], Decoders] = ({}, Decoders())

    def __bool__(self) -> bool:
        return bool(self.schemas)

    def register(self) -> None:
        """Add schema files that changed as new versions; before anything starts. Refuses one that is not compatible."""
        for each in self._with_subject():
            if each.file is not None:
                entry = each.entry
                found = ensure_registered(
                    self._known, str(each.subject), each.file, entry.auto_register, entry.compatibility
                )
                self._files[each.place] = found.version
        self.decoders(self.choose(), {})  # refuse now what no task could use

    def choose(self) -> dict[str, int]:
        """The version that the next epoch uses for each entry; it is written into the manifest."""
        chosen = {}
        for each in self._with_subject():
            found = self._now(each)
            if found.type != each.entry.schema_type and each.format_type.schema_use == "required":
                raise ConfigError(
                    f"the subject {each.subject!r} is of type {found.type}, not {each.entry.schema_type}",
                    code="PEN-1020",
                    hint="correct schema_type or subject",
                )
            chosen[each.place] = found.version
            self._wire[str(each.subject), found.version] = found
        if not self._last[1].schemas or chosen != self._last[0]:
            self._last = (chosen, self.decoders(chosen, {}))
        return chosen

    def file_versions(self) -> dict[str, int]:
        """The version of each entry that goes by its file."""
        return {each.place: self._files[each.place] for each in self._with_subject() if self._goes_by_file(each)}

    def _goes_by_file(self, each: TopicSchema) -> bool:
        return each.uses_file and each.place in self._files

    def refused(self, topics: Iterable[Topic], payloads: Sequence[bytes]) -> Failed | None:
        """
        The payloads that no row of some topic can be made of, by the versions that were chosen last: rule and reason.

        None: no topic has a schema.
        """
        decoders = [decoder for decoder in map(self._last[1].of, topics) if decoder is not None]
        if not decoders or not payloads:
            return {} if decoders else None
        found: Failed = {}
        texts = pa.array(payloads, pa.binary())
        envelopes = pa.record_batch({"key": pa.nulls(len(payloads), pa.binary()), "payload": texts})
        for decoder in decoders:
            failures = decoder.decode(envelopes).failures
            every = zip(failures.positions.tolist(), failures.rules, failures.reasons, strict=True)
            # Whether all columns are unknown is for the epoch to say: it knows the columns of those before it.
            found |= {at: (rule, reason) for at, rule, reason in every if rule != NO_COLUMNS}
        return found

    def decoders(
        self,
        versions: Mapping[str, int],
        columns: Mapping[Topic, pa.Schema],
        pinned: Mapping[Topic, Sequence[str]] = MappingProxyType({}),
    ) -> Decoders:
        """What the tasks of an epoch decode with: the same for the same versions and columns."""
        if not self.schemas:
            return Decoders()
        expected = {each.entry.expected_subject for each in self.schemas.entries}
        resolve = {subject: Resolve(self._known, subject, self._run) for subject in expected}
        made = Decoders(self.schemas, self._chosen(versions), resolve, columns, dict(pinned))
        for each in self.schemas.entries:
            make_format(each, made.wire, resolve[each.entry.expected_subject])
        return made

    def decoders_unregistered(self) -> Decoders:
        """What a run would decode with, by the files as they are; registers nothing, for `penstock check --sample`."""
        if not self.schemas:
            return Decoders()
        files = {each.subject: each.file for each in self._with_subject() if each.file is not None}
        wire = {}
        for each in self._with_subject():
            of_another = files.get(each.subject) if each.entry.version_strategy == "latest" else None
            wire[each.place] = each.file or of_another or self._now(each)
        expected = {each.entry.expected_subject for each in self.schemas.entries}
        return Decoders(
            self.schemas, wire, {subject: Resolve(self._known, subject, self._run) for subject in expected}, {}
        )

    def unusable(self) -> Iterator[tuple[TopicSchema, ConnectorError]]:
        """Entries that nothing could be decoded with, by the files as they are, each with the reason; for `penstock check`."""
        made = self.decoders_unregistered()
        for each in self.schemas.entries:
            try:
                make_format(each, made.wire, None).columns()
            except ConnectorError as error:
                yield each, error

    def versions_unregistered(self) -> dict[str, int | None]:
        """The versions that a run would use, as `decoders_unregistered`; None: a file that the registry does not have yet."""
        found: dict[str, int | None] = {}
        for each in self._with_subject():
            known = self._known.find_schema(str(each.subject), each.file) if each.file is not None else None
            if each.file is not None and (known is None or each.uses_file):
                found[each.place] = known.version if known is not None else None
            else:
                found[each.place] = self._now(each).version
        return found

    @property
    def _known(self) -> Registry:
        assert self._registry is not None
        return self._registry

    def _now(self, each: TopicSchema) -> WireSchema:
        """The version that an entry asks for, as the registry has it now."""
        if self._goes_by_file(each):
            return self._fetched(str(each.subject), self._files[each.place])
        return choose(self._known, str(each.subject), each.entry.version_strategy)

    def _chosen(self, versions: Mapping[str, int]) -> dict[str, WireSchema]:
        """By entry; one that a manifest does not know is newer than it is."""
        chosen = {}
        for each in self._with_subject():
            version = versions.get(each.place)
            try:
                chosen[each.place] = self._now(each) if version is None else self._fetched(str(each.subject), version)
            except ConfigError as error:
                if version is None or error.code != "PEN-1031":
                    raise
                raise ConfigError(
                    f"{error.message}, and the epoch in hand was planned with it",
                    code=error.code,
                    hint="`penstock offsets restage FILE` has it take the version that the file asks for now",
                ) from error
        return chosen

    def _fetched(self, subject: str, version: int) -> WireSchema:
        if (subject, version) not in self._wire:
            self._wire[subject, version] = self._known.fetch_schema(subject, version)
        return self._wire[subject, version]

    def _with_subject(self) -> Sequence[TopicSchema]:
        return [each for each in self.schemas.entries if each.subject is not None]
