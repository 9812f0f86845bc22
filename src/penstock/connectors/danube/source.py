"""Read topics of a Danube broker, and acknowledge a message once it is on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from penstock.connectors.danube import partitions
from penstock.connectors.danube.loop import submit
from penstock.connectors.danube.message import stream_of
from penstock.connectors.danube.names import EXCLUSIVE, KEY_SHARED, Settings
from penstock.connectors.danube.session import Listener
from penstock.errors import ConfigError
from penstock.schema.registry.danube_client import Calls, DanubeConfig, first
from penstock.source import (
    ENVELOPE_SCHEMA,
    ConnectorMetrics,
    Finding,
    HealthStatus,
    Schemas,
    Sender,
    SourceContext,
    StreamingSource,
)


class DanubeSourceConfig(DanubeConfig):
    identity: ClassVar[frozenset[str]] = frozenset({"topics", "subscription", "key_filters"})

    topics: Annotated[list[str], Field(min_length=1)]
    """Topics to read, such as `/default/events`; all partitions of each. A stream has the name of its topic."""

    subscription: Annotated[str, Field(min_length=1)]
    """Name of the subscription. The broker keeps for it what was acknowledged; a new one begins with the next message."""

    subscription_type: Literal["exclusive", "shared", "failover", "key_shared"] = "exclusive"
    """Who else may read under the same name: nobody, others in turn, others when this one is gone, or others by key."""

    key_filters: list[str] = Field(default=[])
    """With `key_shared`: the routing keys to get, with `*` and `?`; none: all. What no consumer wants, the broker skips."""

    consumer_name: str | None = Field(default=None, min_length=1)
    """Name of this consumer, by default the pipeline's. Of two with one name the later takes over; otherwise see the page."""

    create_topics: bool = False
    """Make a topic that is not there, reliable and with `partitions`; otherwise that is an error."""

    partitions: NonNegativeInt = 0
    """With `create_topics`: partitions that a topic is made with, as many as what sends to it has; 0: none."""

    expected_schema_subject: str | None = Field(default=None, min_length=1)
    """A message whose schema has another subject, or that has none, is refused with a reason (see the page)."""

    schema_frame: bool = False
    """Put the id of a message's schema in front of its payload, for `framing = "confluent"` with this broker's registry."""

    @field_validator("topics")
    @classmethod
    def _full_names(cls, topics: list[str]) -> list[str]:
        for topic in topics:
            if topic.count("/") != 2 or not topic.startswith("/") or topic.endswith("/"):
                raise ValueError(f"{topic!r} is not of the form /namespace/name")
        if len(set(topics)) < len(topics):
            raise ValueError("a topic is named twice")
        if twice := [topic for topic in topics if stream_of(topic) != topic and stream_of(topic) in topics]:
            raise ValueError(f"{twice[0]!r} is a partition of a topic that is named too")
        return topics

    @model_validator(mode="after")
    def _filters_fit(self) -> DanubeSourceConfig:
        if self.key_filters and self.subscription_type != "key_shared":
            raise ValueError('`key_filters` need subscription_type = "key_shared"')
        if self.partitions and not self.create_topics:
            raise ValueError("`partitions` are for topics that are made: set create_topics = true, or leave it out")
        return self


class Danube(StreamingSource[DanubeSourceConfig]):
    """
    One stream per topic, with the messages of each partition in the broker's order; a message is acknowledged after the fsync.

    Supports exactly-once for what the broker delivers: redeliveries are dropped, also over restarts of the broker, as long
    as they are among the last 100,000 messages. It cannot bring back what the broker itself loses: messages of topics
    that are not reliable, and what a restart of the broker drops. Several pipelines that share one subscription may get
    a message each when an acknowledgement is lost.
    """

    name = "danube"

    def __init__(self, config: DanubeSourceConfig) -> None:
        super().__init__(config)
        self._listener: Listener | None = None

    def open(self, context: SourceContext = SourceContext()) -> None:
        self.close()
        super().open(context)
        with Calls(self.config) as calls:
            for topic in self.config.topics:
                found = first(lambda: calls.partitions(topic))  # noqa: B023 - called at once
                if not self.config.create_topics:
                    if found:
                        continue
                    raise ConfigError(
                        f"there is no topic {topic} at {self.config.url}",
                        code="PEN-1016",
                        hint="start what sends to it first, make it with danube-admin, or set create_topics = true",
                    )
                if found and not self.config.partitions:
                    continue
                for name in partitions.missing(topic, self.config.partitions, found):
                    first(lambda: calls.create(name, reliable=True))  # noqa: B023 - called at once
        self._listener = Listener(self._settings(context))

    def close(self) -> None:
        self._listener = None

    def schema(self) -> Schemas:
        return dict.fromkeys(self.config.topics, ENVELOPE_SCHEMA)

    def check(self) -> Sequence[Finding]:
        with Calls(self.config) as calls:
            found = [
                Finding(False, f"there is no topic {topic}", f"danube-admin topics create {topic}")
                for topic in self.config.topics
                if not calls.partitions(topic) and not self.config.create_topics
            ]
        if self.config.exposes_token:
            found.append(Finding(False, "the token goes over the network in plain text", "use https:// in `url`"))
        return found

    def start_streaming(self, sender: Sender) -> None:
        assert self._listener is not None, "open it first"
        submit(self._listener.run(sender)).result()

    def health_check(self) -> HealthStatus:
        return self._listener.health() if self._listener is not None else HealthStatus()

    def metrics(self) -> ConnectorMetrics:
        return self._listener.counts.metrics() if self._listener is not None else ConnectorMetrics()

    def _settings(self, context: SourceContext) -> Settings:
        kinds: dict[str, Any] = {"exclusive": EXCLUSIVE, "shared": 1, "failover": 2, "key_shared": KEY_SHARED}
        own = self.config
        return Settings(
            config=own,
            topics=tuple(own.topics),
            subscription=own.subscription,
            kind=kinds[own.subscription_type],
            consumer=own.consumer_name or context.pipeline or "penstock",
            filters=tuple(own.key_filters),
            subject=own.expected_schema_subject,
            frames=own.schema_frame,
            notes=context.state_dir,
        )
