"""Profiles of AWS: keys and region by name, from the files that its tools share."""

from __future__ import annotations

import configparser
import os
from pathlib import Path

from penstock.errors import ConfigError

_NAMES = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "role_arn": "role_arn",
}


def keys_of(profile: str) -> dict[str, str]:
    """The keys and the region of a profile, as storage options. Files are read at each call, so that renewed keys are found."""
    found = _profile(profile)
    if "role_arn" in found and "source_profile" in found:  # the keys by which the role is asked for
        found = {**_profile(found["source_profile"]), **found}
    keys = {ours: found[theirs] for theirs, ours in _NAMES.items() if theirs in found}
    if not {"access_key_id", "secret_access_key"} <= keys.keys():
        raise ConfigError(
            f"the AWS profile {profile!r} holds no keys on this machine",
            code="PEN-1004",
            hint="put aws_access_key_id and aws_secret_access_key into it, or role_arn and source_profile, on every machine "
            "that writes; SSO is not resolved",
        )
    return keys


def _profile(name: str) -> dict[str, str]:
    section = name if name == "default" else f"profile {name}"
    config = _section("AWS_CONFIG_FILE", "config", section)
    return {**config, **_section("AWS_SHARED_CREDENTIALS_FILE", "credentials", name)}


def _section(variable: str, name: str, section: str) -> dict[str, str]:
    path = Path(os.environ.get(variable) or Path.home() / ".aws" / name).expanduser()
    parser = configparser.ConfigParser(interpolation=None, default_section="")
    try:
        parser.read(path)
    except configparser.Error as error:
        raise ConfigError(
            f"the AWS file {path} cannot be read: line {getattr(error, 'lineno', '?')} is wrong",
            code="PEN-1003",
            hint="correct it",
        ) from None  # the error would show the line, and so a key
    return dict(parser[section]) if parser.has_section(section) else {}
