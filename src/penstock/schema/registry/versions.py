"""Which version of a subject is used, and how a schema file becomes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from pydantic import PositiveInt

from penstock.config import Config
from penstock.errors import ConfigError, SchemaError
from penstock.formats import WireSchema
from penstock.schema.compatibility import Compatibility, Incompatibility, incompatibilities
from penstock.schema.registry import Registry


class Pinned(Config):
    """`version_strategy = { pinned = 2 }`."""

    pinned: PositiveInt
    """The version to use, whatever else there is."""


class Minimum(Config):
    """`version_strategy = { minimum = 1 }`."""

    minimum: PositiveInt
    """The oldest version to accept; the newest is used."""


VersionStrategy: TypeAlias = Literal["latest"] | Pinned | Minimum


def choose(registry: Registry, subject: str, strategy: VersionStrategy = "latest") -> WireSchema:
    """The version of a subject that a pipeline uses; asked on the driver when an epoch is planned."""
    if isinstance(strategy, Pinned):
        return registry.fetch_schema(subject, strategy.pinned)
    latest = registry.fetch_schema(subject)
    if isinstance(strategy, Minimum) and latest.version < strategy.minimum:
        raise ConfigError(
            f"the latest version of {subject!r} is {latest.version}, and at least {strategy.minimum} is asked for",
            code="PEN-1031",
            hint="register a newer version, or lower `minimum` in version_strategy",
        )
    return latest


def ensure_registered(
    registry: Registry,
    subject: str,
    schema: WireSchema,
    auto_register: bool = True,
    compatibility: Compatibility | None = None,
) -> WireSchema:
    """
    The version of a subject that a schema file is; a new one is added if the file changed and fits the earlier ones.

    Runs before anything starts, and may run again: the same file gives the same version.
    """
    known = review(registry, subject, schema, auto_register, compatibility)
    if known is not None:
        return known
    if compatibility is not None and registry.compatibility(subject) is not compatibility:
        registry.set_compatibility(subject, compatibility)
    return registry.register_schema(subject, schema)


def review(
    registry: Registry,
    subject: str,
    schema: WireSchema,
    auto_register: bool = True,
    compatibility: Compatibility | None = None,
) -> WireSchema | None:
    """
    The version that a schema file is, or None for one that may be added; raises why it may not. Changes nothing.

    A `compatibility` of its own takes precedence over the registry's, but in a shared registry only for a subject that is new.
    """
    found = registry.find_schema(subject, schema)
    if found is not None:
        return found
    if not auto_register:
        raise ConfigError(
            f"the schema file is no version of {subject!r} in the registry, and auto_register is false",
            code="PEN-1031",
            hint="register it (penstock schemas register FILE), set auto_register = true, or use a registered file",
        )
    versions = registry.versions(subject)
    known = registry.compatibility(subject)
    if compatibility is None or compatibility is known:
        problems = registry.check_compatibility(subject, schema)
    elif registry.is_shared and versions:
        raise ConfigError(
            f"the registry keeps {known} compatibility for {subject!r}, and the file says {compatibility}",
            code="PEN-1032",
            hint=f'set compatibility = "{known}" in the file, or change it in the registry: others use it as well',
        )
    else:
        problems = incompatibilities(
            compatibility, [registry.fetch_schema(subject, each) for each in versions], replace(schema, subject=subject)
        )
    if problems:
        raise refusal(subject, compatibility or known, problems)
    return None


def refusal(subject: str, mode: Compatibility, problems: Sequence[Incompatibility]) -> SchemaError:
    """The error for a schema that may not become the next version of a subject."""
    listed = "".join(f"\n  {each}" for each in problems)
    return SchemaError(
        f"the schema breaks {mode} compatibility of {subject!r}; nothing was registered:{listed}",
        code="PEN-4030",
        hint="change the fields that are named, use a new subject, or set another compatibility for this one",
    )
