"""The options of object stores, `storage_options`: one set of names for all connectors, whatever their clients call them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlparse

from pydantic import AfterValidator

from penstock.config import Secret
from penstock.errors import ConfigError
from penstock.store.profiles import keys_of
from penstock.store.roles import assumed

Options = Mapping[str, str | bool | Secret]

SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""The schemes of addresses, and which kind of store each names."""

SECRET = {"access_key_id", "secret_access_key", "session_token", "account_key", "sas_token", "service_account_key"}
"""Options that hold secrets: never plain text."""

KEYS = {"access_key_id", "profile", "role_arn", "account_key", "sas_token", "service_account", "service_account_key"}
"""Options of which each says who asks."""

NAMES = {
    "s3": {
        *("access_key_id", "secret_access_key", "session_token", "region", "endpoint", "allow_http"),
        *("virtual_hosted_style_request", "server_side_encryption", "sse_kms_key_id", "metadata_endpoint"),
        *("profile", "role_arn", "sts_endpoint"),
    },
    "gs": {"service_account", "service_account_key", "allow_http"},
    "az": {"account_name", "account_key", "sas_token", "endpoint", "allow_http"},
}

_PREFIXES = ("aws_", "azure_storage_", "azure_", "google_")


def is_object_url(where: str) -> bool:
    """True for an address of an object store; one with a scheme that nobody knows is a `ConfigError`."""
    scheme, found, _ = where.partition("://")
    if not found or where.startswith("file:///"):
        return False
    if scheme not in SCHEMES:
        raise ConfigError(
            f"`path` names a kind of store that is not known: {where}",
            code="PEN-1009",
            hint=f"write to a local or mounted directory, or to one of {', '.join(f'{each}://' for each in SCHEMES)}",
        )
    return True


def dataset(where: str) -> tuple[str, str]:
    """How lineage tools call a place: `s3://bucket` and the key, or `file` and the path."""
    if not is_object_url(where):
        return "file", os.path.abspath(where.removeprefix("file://"))
    url = urlparse(where)
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}", url.path.strip("/") or "/"


def kind_of(where: str) -> str:
    return SCHEMES[urlparse(where).scheme]


def _known(options: dict[str, str | bool | Secret]) -> dict[str, str | bool | Secret]:
    """The options by our names; clients would silently pass over a name that they do not know."""
    every = set().union(*NAMES.values())
    found: dict[str, str | bool | Secret] = {}
    for given, value in options.items():
        name = given.lower()
        name = next((name.removeprefix(each) for each in _PREFIXES if name.startswith(each)), name)
        if name not in every:
            near = difflib.get_close_matches(name, sorted(every), 1)
            raise ValueError(
                f"there is no storage option {given!r}"
                + (f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(every))}")
            )
        if name in SECRET and not isinstance(value, Secret):
            raise ValueError(f'{given} is a secret: give a reference, {{ env = "NAME" }} or {{ file = "path" }}')
        found[name] = value
    return found


StorageOptions = Annotated[dict[str, str | bool | Secret], AfterValidator(_known)]
"""The type of the option `storage_options`."""


def revealed(where: str, options: Options) -> dict[str, str]:
    """The options of the store at an address as texts, secrets among them: call it where the client is made."""
    kind = kind_of(where)
    strange = sorted(set(options) - NAMES[kind])
    if strange:
        raise ConfigError(
            f"the store of {where} has no option {strange[0]!r}",
            code="PEN-1002",
            hint=f"it takes {', '.join(sorted(NAMES[kind]))}",
        )
    texts = {name: value.reveal() if isinstance(value, Secret) else value for name, value in options.items()}
    plain = {name: str(value).lower() if isinstance(value, bool) else value for name, value in texts.items()}
    profile = plain.pop("profile", None)
    found = plain if profile is None else {**keys_of(profile), **plain}
    role, endpoint = found.pop("role_arn", ""), found.pop("sts_endpoint", "")
    return {**found, **assumed(role, found, endpoint)} if role else found


def has_keys(options: Options) -> bool:
    """True if the options say who asks."""
    return not KEYS.isdisjoint(options)


def allows_http(options: Mapping[str, str]) -> bool:
    """An address with `http://` says it; `allow_http = false` forbids it."""
    return options.get("allow_http", str(options.get("endpoint", "").startswith("http://"))).lower() == "true"


def for_delta(where: str, options: Options) -> dict[str, str]:
    """As the Delta client takes them; it retries no longer than we do."""
    prefix = {"s3": "aws_", "gs": "google_", "az": "azure_storage_"}[kind_of(where)]
    texts = revealed(where, options)
    named = {f"{prefix}{name}": value for name, value in texts.items() if name != "allow_http"}
    patience = {"timeout": "30s", "connect_timeout": "5s", "max_retries": "4", "retry_timeout": "8s"}
    return {**named, **patience, "allow_http": str(allows_http(texts)).lower()}
