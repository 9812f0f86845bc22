"""The sections of a pipeline file that belong to no connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from penstock import store
from penstock.config import Config, Secret
from penstock.pipeline.routing import OnError, Route
from penstock.schema.compatibility import Compatibility
from penstock.schema.evolution import Policy
from penstock.schema.registry.versions import VersionStrategy
from penstock.store import Place, StorageOptions


class Processing(Config):
    """The `[processing]` section; every key has a default."""

    state_dir: Path = Path("state")
    """
    Directory of manifests, journals and the lock. Relative to the pipeline file. An address in an object store, such as
    `s3://bucket/orders`, is taken as `state_store`.
    """

    state_store: str | None = Field(default=None, min_length=1)
    """
    Address in an object store of all that must outlive this machine: `state_dir` is then a copy to work in, made again
    wherever the pipeline starts.
    """

    state_options: StorageOptions = Field(default_factory=dict)
    """How the store of `state_store` is reached, by the names of [object stores](object-stores.md#options)."""

    checkpoint: bool = True
    """Keep manifests. Without them a restart reads everything again, and exactly-once is refused."""

    poll_interval_ms: PositiveInt = 100
    """How often a source that sends no signal is asked for new data while it is idle."""

    epoch_interval_ms: NonNegativeInt = 200
    """Least time between the starts of two epochs, unless a source asks for one or its journal is full."""

    max_batch_records: PositiveInt = 65536
    """Hint for how many records one poll of a polling source returns."""

    max_epoch_rows: PositiveInt = 10_000_000
    """Admission control: about how many rows of one source an epoch reads at most."""

    max_epoch_bytes: PositiveInt = 1 << 28
    """
    About how many bytes of one source's journal, or of Kafka's topics, an epoch reads at most. On a cluster those of a journal
    may travel from the driver.
    """

    journal_max_bytes: PositiveInt = 1 << 30
    """Size of one source's journal at which the source is held back."""

    linger_ms: NonNegativeInt = 5
    """How long the journal waits for more records before an fsync that serves them all."""

    max_retries: NonNegativeInt = 10
    """Retryable failures in a row after which the pipeline stops."""

    retry_backoff_ms: PositiveInt = 100
    """First pause before a retry; it doubles, with jitter."""

    max_backoff_ms: PositiveInt = 30_000
    """Longest pause before a retry."""

    lag_interval_secs: PositiveInt = 10
    """How often a source's lag is sampled."""

    health_timeout_secs: PositiveInt = 60
    """Within this time a dead source, a stuck epoch, a full journal or an unreachable sink turns `/healthz` red."""

    unrouted: Literal["stop", "skip"] = "stop"
    """What to do with rows that no route takes: stop, or skip and count them."""

    on_error: OnError = "stop"
    """What to do with bad records: stop, skip and count them, or keep them as dead letters."""

    max_error_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of bad records, over the last 1,000 or more, at which the pipeline stops instead of leaving them out."""

    dead_letter_sink: str | None = Field(default=None, min_length=1)
    """
    Name of the sink that takes dead letters; none: a Delta table in `dead_letters` under `state_dir`. It gets rows only from
    routes that name it, unless it is the only sink.
    """

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port for the console, metrics, health and status over HTTP; 0 chooses a free one, none serves nothing."""

    metrics_host: str = Field(default="127.0.0.1", min_length=1)
    """Address on which `metrics_port` is opened; any that is not of this machine alone needs a `console_token`."""

    console_token: Secret | None = None
    """Token that actions of the console need, as `{ env = "NAME" }`; none: the console only shows."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""

    @property
    def state_place(self) -> Place | None:
        """Where the state is kept if that is not a disk."""
        return _place_of(self)

    @model_validator(mode="before")
    @classmethod
    def _address_is_a_store(cls, given: Any) -> Any:
        where = given.get("state_dir") if isinstance(given, dict) else None
        if not isinstance(where, str) or "://" not in where:
            return given
        if given.get("state_store") is not None:
            raise ValueError("give the address as `state_store`, and as `state_dir` the directory of its copy")
        return {**{name: value for name, value in given.items() if name != "state_dir"}, "state_store": where}

    @field_validator("state_store")
    @classmethod
    def _is_an_address(cls, where: str | None) -> str | None:
        if where is not None and where.partition("://")[0] not in store.SCHEMES:
            schemes = ", ".join(f"{each}://" for each in store.SCHEMES)
            raise ValueError(f"give an address that begins with one of {schemes}, or name a directory as `state_dir`")
        return where


def _place_of(processing: Processing) -> Place | None:
    return None if processing.state_store is None else store.at(processing.state_store, processing.state_options)


class TelemetryOptions(Config):
    """The `[telemetry]` section: where a run sends what it tells about itself, see [telemetry](telemetry.md)."""

    otlp_endpoint: str | None = None
    """An OpenTelemetry collector, for metrics and traces over OTLP/HTTP: `http://collector:4318`; none: nothing is sent."""

    otlp_headers: dict[str, Secret] = Field(default={})
    """Headers of each request, by name, such as `{ authorization = { env = "OTLP_AUTH" } }`."""

    otlp_interval_secs: PositiveInt = 10
    """How often metrics are sent; the trace of an epoch is sent once it is committed."""

    openlineage_url: str | None = None
    """Where OpenLineage events go: `http://marquez:5000/api/v1/lineage`; none: nothing is sent."""

    openlineage_token: Secret | None = None
    """Token for it, sent as `Authorization: Bearer`."""

    openlineage_namespace: str = Field(default="penstock", min_length=1)
    """The namespace of the pipeline as a job."""

    openlineage_interval_secs: PositiveInt = 60
    """How often an event follows while nothing changes; an event about changed columns or new datasets is sent at once."""

    timeout_secs: PositiveInt = 5
    """How long a collector may take to answer. The pipeline never waits for it."""

    @field_validator("otlp_endpoint", "openlineage_url")
    @classmethod
    def _is_http(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "http://none")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("give an address such as http://collector:4318")
        if parts.username or parts.password:
            raise ValueError("leave the password out of the address, and give it as a header")
        return url


class RouteEntry(Config):
    """One `[[routes]]` entry. Without any, every stream goes to `/{stream}` and to all sinks."""

    stream: str = Field(default="#", alias="from", min_length=1)
    """Streams it takes: `*` is any run of characters except `/`, `+` one level, `#` at the end all levels that follow."""

    exclude: list[str] = Field(default=[], min_length=1)
    """Streams that it leaves out, by the same patterns: with `from = "public.*"`, `exclude = ["public.tmp_*"]`."""

    source: str | None = None
    """Name of the source whose streams it takes; none: all sources."""

    match: dict[str, str] = Field(default={})
    """Patterns that a message's attributes must satisfy, row by row, such as `{ site = "north/#" }`; for columns use `sql`."""

    to: str = "/{stream}"
    """The topic: `{stream}`, `{source}`, `{schema}` and `{table}` (around the stream's first dot), `{1}` (first wildcard)."""

    sinks: list[str] = Field(default=[], min_length=1)
    """Names of the sinks that take the topic; none: all."""

    partitions: PositiveInt = 1
    """Rows of the topic are hashed by key into that many ordered splits."""

    key: list[str] = Field(default=[], min_length=1)
    """Columns whose value keeps its order over `partitions`; none: the key that the source knows."""

    reliable_dispatch: bool = True
    """False lets rows bypass the journal: faster, and lost in a crash unless the source can send them again."""

    sql: str | None = Field(default=None, min_length=1)
    """A query over the epoch's rows, which it sees as the table `input`."""

    transform: str | None = None
    """A function `module:function` from DataFrame to DataFrame, instead of `sql`."""

    per_epoch: bool = False
    """Allows aggregates, DISTINCT, joins and windows, which then see one epoch at a time."""

    streaming: bool = False
    """Runs `sql` or `transform` as a query of Structured Streaming, which keeps its state from epoch to epoch."""

    output_mode: Literal["append", "update"] = "append"
    """For `streaming`: `append` hands on rows that will not change any more; `update` every row that an epoch changed."""

    schema_evolution: Policy | None = None
    """What happens to rows that a target has no place for; none: as the sink says, see there."""

    on_error: OnError | None = None
    """What to do with this route's bad records; none: as the source says, else as `[processing]` says."""

    def route(self) -> Route:
        fields = self.model_dump(exclude={"match", "sinks", "key", "exclude"})
        return Route(
            **fields,
            match=tuple(self.match.items()),
            sinks=tuple(self.sinks),
            key=tuple(self.key),
            exclude=tuple(self.exclude),
        )


Metadata = Literal["key", "timestamp", "attributes", "offset", "stream"]
"""What a message carries besides its payload, as `metadata` names it; the columns are `_key`, `_timestamp`, …"""


class SchemaEntry(Config):
    """One `[[schemas]]` entry: what the payloads of a topic are. Options of the format go beside these."""

    topic: str = Field(min_length=1)
    """The topic, or a pattern as in a route: `/iot/+/temperature`, `/shop/#`."""

    schema_type: str = Field(min_length=1)
    """The format of the payloads: `json`, `json_schema`, `avro`, `protobuf`, `csv`, `string`, `number`, `bytes`, …"""

    direction: Literal["source", "sink"] | None = Field(default=None, alias="for")
    """`"source"`: only for payloads that come in; `"sink"`: only for those that message sinks send; none: for both."""

    schema_file: Path | None = None
    """File that holds the schema, relative to the pipeline file; none: the registry's."""

    subject: str | None = Field(default=None, min_length=1)
    """
    Its name in the schema registry; none: the topic without its leading slash, for formats that have a schema. `{topic}` is the
    topic with dots for slashes, `{record}` the name of the record in `schema_file`: see [registries](registries.md).
    """

    auto_register: bool = True
    """Add the file to the registry as a new version when it changed, if it is compatible; false: refuse to start then."""

    compatibility: Compatibility | None = None
    """What a new version must keep: `"none"`, `"backward"`, `"forward"`, `"full"` or one of these with `_transitive`."""

    version_strategy: VersionStrategy = "latest"
    """Which version to use: `"latest"`, `{ pinned = 2 }` or `{ minimum = 1 }`."""

    expected_subject: str | None = Field(default=None, min_length=1)
    """
    Messages whose frame names a schema of another subject are failures, with the rule `framing.subject`. Needs
    `framing = "confluent"`: without a frame a message names no schema.
    """

    metadata: list[Metadata] = Field(default=[])
    """What else becomes a column: `key`, `timestamp`, `attributes`, `offset`, `stream`; as `_key`, `_timestamp`, …"""

    key: list[str] = Field(default=[], min_length=1)
    """Columns that identify a row, for sinks that update by key."""

    @field_validator("topic")
    @classmethod
    def _with_slash(cls, topic: str) -> str:
        first, slash, _ = topic.partition("/")
        if topic == "#" or (slash and first in ("+", "*")):
            return topic  # these fit topics as they are: all, or those whose slash the wildcard leaves out
        return "/" + topic.lstrip("/")

    @field_validator("subject")
    @classmethod
    def _known_braces(cls, subject: str | None) -> str | None:
        if subject is not None and set("{}") & set(subject.replace("{topic}", "").replace("{record}", "")):
            raise ValueError("only {topic} and {record} can be in braces")
        return subject

    @model_validator(mode="after")
    def _no_repeats(self) -> SchemaEntry:
        if len(set(self.metadata)) < len(self.metadata):
            raise ValueError("`metadata` names something twice")
        return self
