"""Which version of a subject is used, and how a schema file becomes one."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import PositiveInt

from penstock.config import Config
from penstock.errors import ConfigError, SchemaError
from penstock.formats import WireSchema
from penstock.schema.compatibility import Compatibility, Incompatibility
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

    Runs before anything starts, and may run again: the same file gives the same version. With a `compatibility` that
    differs from the registry's own, a registry of the pipeline's own takes it over, and a shared one refuses.
    """
    found = registry.find_schema(subject, schema)
    if found is not None:
        return found
    if not auto_register:
        raise ConfigError(
            f"the schema file is no version of {subject!r} in the registry, and auto_register is false",
            code="PEN-1031",
            hint="register it (penstock schemas FILE register), set auto_register = true, or use a registered file",
        )
    if compatibility is not None:
        _settle(registry, subject, compatibility)
    problems = registry.check_compatibility(subject, schema)
    if problems:
        raise refusal(subject, registry.compatibility(subject), problems)
    return registry.register_schema(subject, schema)


def refusal(subject: str, mode: Compatibility | None, problems: list[Incompatibility] | tuple[Incompatibility, ...]) -> SchemaError:
    """The error for a schema that may not become the next version of a subject."""
    listed = "".join(f"\n  {each}" for each in problems)
    kept = f"{mode} compatibility" if mode else "the compatibility"
    return SchemaError(
        f"the schema breaks {kept} of {subject!r}; nothing was registered:{listed}",
        code="PEN-4030",
        hint="change the fields that are named, use a new subject, or set another compatibility for this one",
    )


def _settle(registry: Registry, subject: str, wanted: Compatibility) -> None:
    known = registry.compatibility(subject)
    if known is wanted:
        return
    if registry.is_shared and registry.versions(subject):
        raise ConfigError(
            f"the registry keeps {known} compatibility for {subject!r}, and the file says {wanted}",
            code="PEN-1032",
            hint=f'set compatibility = "{known}" in the file, or change it in the registry: others use it as well',
        )
    registry.set_compatibility(subject, wanted)
