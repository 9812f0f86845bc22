"""
Schema registries: who keeps the versions of each subject.

    registry = make("confluent", ConfluentConfig(url="https://registry:8081"), state_dir)
    schema = choose(registry, "orders-value", "latest")

A registry is a picklable value: connections and files are opened where they are used.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.formats import WireSchema
from penstock.schema import SchemaRegistryAware
from penstock.schema.compatibility import Compatibility

GROUP = "penstock.registries"
"""Entry-point group of third-party registries."""

BUILT_IN = {
    "embedded": "penstock.schema.registry.embedded:Embedded",
    "confluent": "penstock.schema.registry.confluent:Confluent",
    "danube": "penstock.schema.registry.danube:DanubeRegistry",
}


@runtime_checkable
class Registry(SchemaRegistryAware, Protocol):
    """A schema registry; made from its options and the pipeline's state directory."""

    config_type: ClassVar[type[Config]]
    is_shared: ClassVar[bool]
    """Others use it as well: a pipeline does not change the compatibility of a subject that has versions."""

    def __init__(self, config: Any, state_dir: Path) -> None: ...

    def subjects(self) -> Sequence[str]:
        """All subjects, sorted."""
        ...

    def versions(self, subject: str) -> Sequence[int]:
        """The versions of a subject, oldest first; empty: there is no such subject."""
        ...

    def find_schema(self, subject: str, schema: WireSchema) -> WireSchema | None:
        """The version of a subject that is this very schema."""
        ...

    def places(self, id: int) -> Sequence[tuple[str, int]]:
        """The subjects and versions that have this id: one schema has one id, wherever it is registered."""
        ...

    def compatibility(self, subject: str) -> Compatibility:
        """What new versions of a subject must keep: the subject's own setting, else the registry's."""
        ...

    def set_compatibility(self, subject: str, mode: Compatibility) -> None: ...


def registry_type(name: str) -> type[Registry]:
    """The class of a registry by the `type` in `[registry]`."""
    targets = dict(BUILT_IN)
    if name not in targets:  # else there is no need to look at all that is installed
        targets |= {point.name: point.value for point in entry_points(group=GROUP) if point.name not in BUILT_IN}
    if name not in targets:
        near = difflib.get_close_matches(name, targets, n=1)
        guess = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"unknown registry {name!r}{guess}", code="PEN-1003", hint=f"there are {', '.join(sorted(targets))}"
        )
    module, _, attribute = targets[name].partition(":")
    try:
        found: type[Registry] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the registry {name!r} cannot be imported: {error}",
            code="PEN-1007",
            hint=f"pip install 'penstock[{name}]'",
        ) from error
    return found


def make(name: str, config: Config, state_dir: Path) -> Registry:
    """The registry of a `type` and its options."""
    return registry_type(name)(config, state_dir)
