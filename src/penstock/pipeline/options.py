"""The sections of a pipeline file that belong to no connector."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from penstock.config import Config
from penstock.pipeline.routing import Route
from penstock.schema.evolution import Policy


class Processing(Config):
    """The `[processing]` section; every key has a default."""

    state_dir: Path = Path("state")
    """Directory of manifests, journals and the lock. Relative to the pipeline file."""

    checkpoint: bool = True
    """Keep manifests. Without them a restart begins anew, and exactly-once is refused."""

    poll_interval_ms: PositiveInt = 100
    """How often a source that sends no signal is asked for new data while it is idle."""

    epoch_interval_ms: NonNegativeInt = 200
    """Least time between the starts of two epochs, unless a source asks for one."""

    max_batch_records: PositiveInt = 65536
    """Hint for how many records one poll of a polling source returns."""

    max_epoch_rows: PositiveInt = 10_000_000
    """Admission control: about how many rows of one source an epoch reads at most."""

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
    """Time without progress or a health answer after which a connector counts as unhealthy."""

    unrouted: Literal["stop", "skip"] = "stop"
    """What to do with rows that no route takes: stop, or skip and count them."""

    on_error: Literal["stop", "skip"] = "stop"
    """What to do with bad records: stop, or skip and count them."""

    max_error_rate: float = Field(default=1.0, ge=0, le=1)
    """Share of an epoch's records that may be bad, and skipped, before the pipeline stops."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port for metrics, health and status over HTTP, on 127.0.0.1; 0 chooses a free one, none serves nothing."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""


class RouteEntry(Config):
    """One `[[routes]]` entry. Without any, every stream goes to `/{stream}` and to all sinks."""

    stream: str = Field(default="#", alias="from", min_length=1)
    """Streams it takes: `*` is any run of characters except `/`, `+` one level, `#` at the end all levels that follow."""

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

    schema_evolution: Policy | None = None
    """What happens to rows that a target has no place for; none: as the sink says, see there."""

    def route(self) -> Route:
        fields = self.model_dump(exclude={"match", "sinks", "key"})
        return Route(**fields, match=tuple(self.match.items()), sinks=tuple(self.sinks), key=tuple(self.key))


class Pinned(Config):
    """Exactly this version."""

    pinned: PositiveInt
    """The version."""


class Minimum(Config):
    """This version or a later one."""

    minimum: PositiveInt
    """The lowest version."""


class SchemaEntry(Config):
    """One `[[schemas]]` entry: validate and serialise a topic by a schema. Not supported yet, and refused."""

    topic: str
    """The topic it is for."""

    subject: str
    """Its name in the schema registry."""

    schema_type: Literal["json_schema", "string", "bytes", "number", "avro"]
    """How payloads are written."""

    schema_file: Path | None = None
    """File that holds the schema, relative to the pipeline file."""

    auto_register: bool = False
    """Register the schema when the registry does not have it."""

    version_strategy: Literal["latest"] | Pinned | Minimum = "latest"
    """Which version to use: `"latest"`, `{ pinned = 2 }` or `{ minimum = 1 }`."""
