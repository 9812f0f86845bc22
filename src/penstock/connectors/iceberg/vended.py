"""
Keys that a REST catalog gives with each table, and the place of a table that is reached with them.

Say that nobody has named keys in `storage_options`. The catalog answers the question for a table with its location and with
keys for this location alone, which end after an hour or so. So each table has a store of its own; whatever belongs to its
topic lies below its location, and each look at the table brings keys that are valid then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from penstock import store
from penstock.connectors.iceberg.config import IcebergConfig
from penstock.connectors.lake.sink import LakeSink
from penstock.connectors.lake.targets import Targets
from penstock.errors import ConfigError, ConnectorError
from penstock.health import Finding, HealthStatus
from penstock.sink import Epoch, Topic
from penstock.store import ObjectPath, Options, Place
from penstock.store.options import has_keys, kind_of

if TYPE_CHECKING:
    from penstock.connectors.iceberg.catalog import Catalogs

_S3 = {
    "s3.access-key-id": "access_key_id",
    "s3.secret-access-key": "secret_access_key",
    "s3.session-token": "session_token",
    "s3.endpoint": "endpoint",
    "client.region": "region",
    "s3.region": "region",
}
_SAS = "adls.sas-token"
_SIGNING = ("s3.remote-signing-enabled", "s3.signer")
_ENDS = ("s3.session-token-expires-at-ms",)
_MOST = 512
"""Stores that a process keeps: one for each table and each set of keys."""

_stores: dict[str, ObjectPath] = {}


def vends(config: IcebergConfig, root: Place) -> bool:
    """True if the keys of the tables are the catalog's matter: nobody has named others."""
    return config.catalog_kind == "rest" and isinstance(root, ObjectPath) and not has_keys(config.storage_options)


def place_of(location: str, properties: Mapping[str, str], given: Options) -> ObjectPath:
    """A place of a table, reached with the keys among its properties; what `given` says takes precedence."""
    found = _keys(location, properties)
    if not found and any(properties.get(name, "false").lower() != "false" for name in _SIGNING):
        raise ConfigError(
            "the catalog gives no keys, but wants to sign each request itself, which is not supported",
            code="PEN-1009",
            hint="let it give keys (vended credentials), or name keys in `storage_options`",
        )
    options = {**found, **given}
    address = urlparse(location)
    bucket = f"{address.scheme}://{address.netloc}"
    name = repr((bucket, sorted(options.items(), key=str)))
    root = _stores.get(name)
    if root is None:
        made = store.at(bucket, options)
        assert isinstance(made, ObjectPath)
        made.store.keys_end(min((int(properties[each]) / 1000 for each in _ENDS if each in properties), default=None))
        root = _stores.setdefault(name, made)
        while len(_stores) > _MOST:
            _stores.pop(next(iter(_stores)), None)
    found_place = store.beside(root, location)
    assert isinstance(found_place, ObjectPath)
    return ObjectPath(found_place.store, found_place.key.strip("/"))


def _keys(location: str, properties: Mapping[str, str]) -> dict[str, str]:
    """The keys by our names."""
    kind = kind_of(location)
    if kind == "s3" and "s3.access-key-id" in properties:
        return {ours: properties[theirs] for theirs, ours in _S3.items() if theirs in properties}
    if kind == "az":
        account = urlparse(location).netloc.rpartition("@")[2].partition(".")[0]
        for name, token in properties.items():
            if name == _SAS or name.startswith(f"{_SAS}.{account}"):
                return {"sas_token": token} | ({"account_name": account} if account else {})
    return {}


@dataclass
class TableTargets(Targets):
    """The directories of topics, each where its table is and with the table's keys, once the table is known."""

    _found: dict[Topic, Place] = field(default_factory=dict)

    def found(self, topic: Topic, place: Place) -> None:
        """The table of the topic is here; a later answer has later keys."""
        self._found[topic] = place

    def claim(self, topic: Topic) -> Place:
        planned = super().claim(topic)
        return self._found.get(topic, planned)

    def lists_of(self, topic: Topic) -> Place:
        return self.claim(topic)

    def roots(self) -> list[Place]:
        return list(self._found.values())


class VendedKeys(LakeSink[IcebergConfig]):
    """What a sink does in another way if the keys are the catalog's matter."""

    is_vended: bool = False
    catalogs: Catalogs

    def sweep(self, epoch: Epoch, keep: Sequence[Any]) -> None:
        self._look()
        super().sweep(epoch, keep)

    def check(self) -> Sequence[Finding]:
        if not self.is_vended:
            return super().check()
        found = []
        try:
            with self.catalogs.errors("its configuration"):
                self.catalogs.here()
            self._look()
            for place in self.targets.roots():
                store.try_writing(place)
                found.append(Finding(True, f"{place} can be written with the keys that the catalog gives"))
        except ConnectorError as error:
            return [*found, Finding(False, error.message, error.hint)]
        return found or [Finding(True, "the catalog gives the keys of each table, which are tried with its first rows")]

    def health_check(self) -> HealthStatus:
        return HealthStatus.healthy() if self.is_vended else super().health_check()

    def _look(self) -> None:
        """Find the tables of all topics, and keys for them."""
        for topic in {*self._known, *self.context.topics} if self.is_vended else ():
            self.target(topic).load()
