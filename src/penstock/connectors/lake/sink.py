"""What sinks have in common whose tasks write files and whose driver commits them topic by topic."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import pyarrow as pa
from pydantic import Field, PositiveInt

from penstock import store
from penstock.config import FilePath
from penstock.connectors.lake import lists
from penstock.connectors.lake.commit import Commit, LakeTarget
from penstock.connectors.lake.staging import STAGED, FileSpec, StagedFiles
from penstock.connectors.lake.targets import HIDDEN, Targets
from penstock.connectors.lake.task import LakeTask
from penstock.errors import ConfigError, ConnectorError
from penstock.schema.evolution import EvolutionConfig
from penstock.sink import (
    CommittedEpoch,
    Epoch,
    Positions,
    SinkConnectorCapabilities,
    SinkContext,
    Task,
    Topic,
    TopicSink,
    WriteResult,
)
from penstock.source import Finding, HealthStatus
from penstock.store import Place, StorageOptions
from penstock.store.options import dataset


class LakeConfig(EvolutionConfig):
    path: FilePath
    """Directory of a topic, e.g. `lake/{topic}` or `s3://bucket/lake/{topic}`, where `{topic}` is the topic without its
    leading slash. Object stores: `s3://`, `gs://`, `az://` and `abfss://`."""

    storage_options: StorageOptions = Field(default_factory=dict)
    """How to reach an object store, e.g. `{ region = "eu-central-1", access_key_id = { env = "AWS_ACCESS_KEY_ID" } }`. For
    S3: `access_key_id`, `secret_access_key`, `session_token` (all secrets), `region`, `endpoint`, `allow_http`,
    `virtual_hosted_style_request`, `server_side_encryption`, `sse_kms_key_id`, `metadata_endpoint`, `profile`,
    `role_arn`, `sts_endpoint`. For GCS: `service_account` (a file), `service_account_key` (a secret), `allow_http`. For
    Azure: `account_name`, `account_key` and `sas_token` (secrets), `endpoint`, `allow_http`. Without keys, the role of the
    machine is used."""

    partition_by: tuple[str, ...] = ()
    """Columns whose values become directories (`day=2026-01-01`) and are left out of the files."""

    target_file_rows: PositiveInt = 5_000_000
    """A file ends at about this many rows. Every epoch begins new files."""

    max_open_files: PositiveInt = 64
    """Files that a task writes at the same time, one per partition. When rows of another partition come, the file ends that
    has waited longest for rows."""

    def dataset(self, name: str) -> tuple[str, str]:
        """How lineage tools call the directory of a topic."""
        return dataset(self.path.replace("{topic}", name.strip("/")))


S = TypeVar("S", bound=LakeConfig)


class LakeSink(TopicSink[S, StagedFiles]):
    """
    Tasks write files (`LakeTask`); the driver commits the files of each topic (`LakeTarget`). A sink says which classes these
    are, and how a file is written.
    """

    concurrent = True
    evolves_with_rows = True

    capabilities = (
        SinkConnectorCapabilities()
        .with_exactly_once()
        .with_two_phase_commit()
        .with_schema_evolution()
        .with_partitioned()
    )

    def __init__(self, config: S) -> None:
        super().__init__(config)
        path = config.path.removeprefix("file://") if config.path.startswith("file:///") else config.path
        # Here and not in `open`: the working directory of an executor may be another one.
        self._path = path if "://" in path else os.path.abspath(path)
        self._task: LakeTask | None = None
        self._known: dict[Topic, LakeTarget[Any]] = {}
        self._probe = _Probe()

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.config.model_copy(update={"path": self._path}),)

    def open(self, context: SinkContext = SinkContext()) -> None:
        super().open(context)
        self.targets = Targets(self._path, self.config.storage_options)
        if self.config.storage_options and store.is_local(self.targets.root):
            raise ConfigError(
                f"`storage_options` are for object stores, and `path` is local: {self.config.path}",
                code="PEN-1003",
                hint="leave them out, or give an address such as s3://bucket/{topic}",
            )
        store.make_directory(self.targets.root)

    def close(self) -> None:
        if self._task is not None:
            self._task.stage.abandon()
            self._task = None
        self._known.clear()

    def spec(self) -> FileSpec:
        """How the sink's files are named, laid out and written."""
        raise NotImplementedError

    def task(self, epoch: Epoch, task: Task) -> LakeTask:
        """What writes the rows of one task."""
        raise NotImplementedError

    def make_target(self, topic: Topic) -> LakeTarget[Any]:
        raise NotImplementedError

    # -- in tasks --------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: Epoch, task: Task) -> None:
        self._task = self.task(epoch, task)

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        assert self._task is not None
        return self._task.write(topic, batch)

    def flush(self) -> None:
        assert self._task is not None
        self._task.stage.flush()

    def pre_commit(self, epoch: Epoch) -> StagedFiles:
        assert self._task is not None
        receipt = self._task.finish()
        self._task = None
        return receipt

    # -- on the driver ---------------------------------------------------------------------------------------------

    def target(self, topic: Topic) -> LakeTarget[Any]:
        """The topic's target; one object per topic for as long as the sink is open."""
        found = self._known.get(topic)
        return found if found is not None else self._known.setdefault(topic, self.make_target(topic))

    needs_conditional_writes: ClassVar[bool] = True
    """False for a sink whose commits are decided by a catalog."""

    def check(self) -> Sequence[Finding]:
        root = self.targets.root
        if store.is_local(root):
            return ()
        try:
            if self.needs_conditional_writes:
                store.refuse_without_conditions(root)
            else:
                store.try_writing(root)
        except ConnectorError as error:
            return [Finding(False, f"{root}: {error.message}", error.hint)]
        more = ", and takes conditional writes" if self.needs_conditional_writes else ""
        return [Finding(True, f"{root} can be written{more}")]

    def commit_topic(self, epoch: Epoch, topic: Topic, receipts: Sequence[StagedFiles], end: Positions) -> None:
        self.target(topic).commit(Commit(epoch, [receipt.staged[topic] for receipt in receipts], end))

    def committed_epoch(self, pipeline: str, topic: Topic) -> CommittedEpoch | None:
        self._probe.once(self)  # the runtime asks this before it plans an epoch
        return self.target(topic).committed(pipeline)

    def sweep(self, epoch: Epoch, keep: Sequence[Any]) -> None:
        kept: set[str] = set().union(*(receipt.names() for receipt in keep))
        live: dict[Topic, set[str]] = {}

        def is_kept(topic: Topic, place: Place) -> bool:
            if topic not in live:  # a file of the target is never a leftover
                live[topic] = self.target(topic).live_files(epoch.pipeline)
            name = place.name.removesuffix(STAGED)
            return name in kept or name in live[topic]

        for root in self.targets.roots():
            lists.sweep(root, epoch, is_kept)

    def schema(self, topic: Topic) -> pa.Schema | None:
        """The columns of the target; more may come. In a task, as the task saw them."""
        return self._task.stored(topic) if self._task is not None else self.target(topic).schema()

    takes_nested: ClassVar[bool] = True

    def is_seeded(self, topic: Topic) -> bool:
        return self.target(topic).is_seeded()

    def mark_seeded(self, topic: Topic) -> None:
        self.target(topic).mark_seeded(self.context.topic(topic).source_schema)

    def health_check(self) -> HealthStatus:
        root = self.targets.root
        try:
            fine = os.access(root, os.W_OK) if isinstance(root, Path) else store.head(root / HIDDEN) or True
        except ConnectorError as error:
            return HealthStatus.unhealthy(error.message)
        return HealthStatus.healthy() if fine else HealthStatus.unhealthy(f"cannot write to {root}")


class _Probe:
    """Before the first commit: refuse a store in which two writers would overwrite each other unseen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False

    def once(self, sink: LakeSink[Any]) -> None:
        with self._lock:
            if not self._done and sink.needs_conditional_writes:
                store.refuse_without_conditions(sink.targets.root)
            self._done = True
