"""From one TOML file to a checked pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from penstock.config import Config
from penstock.routing import Router
from penstock.sink import DeliveryGuarantee, SinkConnector
from penstock.source import SourceConnector


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

    max_error_rate: float = 1.0
    """Share of an epoch's records that may be skipped before the pipeline stops."""

    metrics_port: NonNegativeInt | None = None
    """Port for metrics, health and status over HTTP, on 127.0.0.1; 0 chooses a free one, none serves nothing."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""


@dataclass(frozen=True)
class Pipeline:
    """A checked pipeline: connectors made, not opened."""

    name: str
    sources: Mapping[str, SourceConnector[Any]]
    sinks: Mapping[str, SinkConnector[Any, Any]]
    router: Router
    delivery: DeliveryGuarantee = DeliveryGuarantee.AT_LEAST_ONCE
    processing: Processing = field(default_factory=Processing)
