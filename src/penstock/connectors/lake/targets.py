"""Where the rows of each topic go: the option `path`, one directory per topic."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from penstock import store
from penstock.errors import ConfigError
from penstock.sink import Topic
from penstock.store import Options, Place

HIDDEN = "_penstock"
"""Directory for everything that is not rows, in each target and above all targets. Readers skip names that begin with `_`."""

_NAME_BYTES = 255
"""Longest name that file systems take."""

_RESERVED = {"", ".", "..", HIDDEN, "_staging", "_delta_log"}


@dataclass
class Targets:
    """One directory per topic, all of them below one root. Threads may claim directories at the same time."""

    template: str
    options: Options = field(default_factory=dict)
    _paths: dict[Topic, Place] = field(default_factory=dict)
    _owners: dict[Place, Topic] = field(default_factory=dict)
    _below: dict[Place, Topic] = field(default_factory=dict)
    """For each directory above a claimed one: a topic that has its directory there."""

    def __post_init__(self) -> None:
        rest = self.template.replace("{topic}", "")
        if "{" in rest or "}" in rest:
            raise ConfigError(
                f"`path` has an unknown placeholder: {self.template}",
                code="PEN-1003",
                hint="the only placeholder is {topic}",
            )
        before, found, _ = self.template.partition("{topic}")
        self.root: Place = store.at(os.path.dirname(before) if found else before, self.options)
        """The part of the path that is the same for all topics."""

    def roots(self) -> list[Place]:
        """The places of all such lists."""
        return [self.root]

    def lists_of(self, topic: Topic) -> Place:
        """The place below which tasks write down which files of the topic they begin."""
        return self.root

    def claim(self, topic: Topic) -> Place:
        """The directory of the topic; refused if another topic has the same one, one above it or one below it."""
        known = self._paths.get(topic)
        if known is not None:
            return known
        parts = topic.removeprefix("/").split("/")
        long = any(len(os.fsencode(part)) > _NAME_BYTES for part in parts)
        if _RESERVED.intersection(parts) or not topic.isprintable() or long:
            raise ConfigError(
                f"the topic {topic!r} cannot be a directory", code="PEN-1010", hint="route to another name"
            )
        path = store.beside(self.root, self.template.replace("{topic}", "/".join(parts)))
        self._refuse_clash(path, topic)
        self._owners[path] = topic
        for above in path.parents:
            self._below.setdefault(above, topic)
        self._refuse_clash(path, topic)  # another thread may have claimed its directory since the first look
        self._paths[topic] = path
        return path

    def _refuse_clash(self, path: Place, topic: Topic) -> None:
        owners = [(path, self._below.get(path)), *((each, self._owners.get(each)) for each in (path, *path.parents))]
        for place, other in owners:
            if other is not None and other != topic:
                raise ConfigError(
                    f"the topics {other} and {topic} meet in {place}",
                    code="PEN-1011",
                    hint='give each a directory of its own: path = ".../{topic}", and no topic below another',
                )
