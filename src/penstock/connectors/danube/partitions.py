"""The partitions of a topic: all of them are made before the first message is sent, or none is."""

from __future__ import annotations

from collections.abc import Collection

from penstock.errors import ConfigError


def names(topic: str, count: int) -> list[str]:
    """What a topic with so many partitions consists of; with 0, of itself."""
    return [f"{topic}-part-{number}" for number in range(count)] or [topic]


def has_gap(topic: str, found: Collection[str]) -> bool:
    """True for partitions that are not the first ones: a topic that is being made, or whose making was cut short."""
    return topic not in found and not set(names(topic, len(found))) <= {*found, topic}


def missing(topic: str, count: int, found: Collection[str]) -> list[str]:
    """
    What has to be made of a topic with so many partitions, of which these are there; a `ConfigError` if it was made with others.

    The last one comes first: a topic whose making was cut short is known by its gap, and one with fewer partitions has none.
    A consumer that subscribes to a partition later than its first message would never see that message.
    """
    wanted = names(topic, count)
    rest = [name for name in reversed(wanted) if name not in found]
    if set(found) <= set(wanted) and (not found or not rest or has_gap(topic, found)):
        return rest
    has = "no partitions" if topic in found else f"{len(found)} partitions"
    raise ConfigError(
        f"{topic} has {has}, and `partitions` is {count}",
        code="PEN-1016",
        hint=f"set partitions = {0 if topic in found else len(found)}, as the topic was made: "
        "a key keeps its partition, and consumers know those that are there",
    )
