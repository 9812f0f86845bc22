"""The client of one bucket: how it is made, renewed, and what its errors mean."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

from penstock.errors import ConfigError, ConnectorError, FatalError, RetryableError
from penstock.store.options import Options, allows_http, kind_of, revealed
from penstock.store.places import Changed
from penstock.store.roles import forget

_RETRIES = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=8),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
"""A server that is gone is noticed within 10 seconds; the runtime goes on trying, and says so."""

_LOOK_SECS = 30.0

_EXPIRED = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired", "token has expired")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
_SLOW_DOWN = ("SlowDown", "429 Too Many", "Throttl", "ServerBusy", "RequestLimitExceeded")

_lock = threading.Lock()
_first_pid: list[int] = []


class Bucket:
    """A bucket or container by its address. The client is made at the first request, where the secrets are revealed."""

    def __init__(self, url: str, options: Options) -> None:
        self.url = url
        self.options = dict(options)
        self._revealed: dict[str, str] | None = None
        self._made: Any = None
        self._ends_at: float | None = None
        self.look_again = 0.0
        """When the keys of a role are looked at again: they are renewed before they end."""

    @property
    def client(self) -> Any:
        with _lock:
            pid = os.getpid()
            if not _first_pid:
                _first_pid.append(pid)
            if _first_pid[0] != pid:
                raise FatalError(
                    "this process was forked from one that has used an object store, whose client would hang here",
                    code="PEN-5012",
                    hint="fork before the first request, or start a fresh process",
                )
            if self._made is None or (self._has_role and time.monotonic() > self.look_again):
                now, self.look_again = revealed(self.url, self.options), time.monotonic() + _LOOK_SECS
                if self._made is None or now != self._revealed:
                    self._revealed, self._made = now, _client(self.url, now)
            return self._made

    def keys_end(self, time: float | None) -> None:
        """The keys among the options end then (seconds since 1970): a refusal after it is no mistake of the user."""
        self._ends_at = time

    @property
    def _has_role(self) -> bool:
        return "role_arn" in self.options or "profile" in self.options

    def _renewed(self) -> bool:
        """Reveal the secrets again; True if they have changed, and the next request uses them."""
        now = revealed(self.url, self.options)
        with _lock:
            is_new = now != self._revealed
            if is_new:
                self._made = None
        return is_new

    @contextlib.contextmanager
    def errors(self, place: object) -> Iterator[None]:
        """The client's errors as ours."""
        obstore = library()
        exceptions = obstore.exceptions
        try:
            yield
        except FileNotFoundError as error:
            if any(mark in str(error) for mark in _NO_BUCKET):
                raise self.failed(place, error) from error
            raise FileNotFoundError(errno.ENOENT, "no such object", str(place)) from None
        except (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise self._refused(place, error) from error
        except exceptions.PreconditionError as error:
            raise Changed(f"{place} is not the object that it was") from error
        except (exceptions.BaseError, OSError) as error:
            raise self.failed(place, error) from error

    def _refused(self, place: object, error: Exception) -> ConnectorError:
        is_over = self._ends_at is not None and time.time() >= self._ends_at
        is_expired = is_over or any(mark in str(error) for mark in _EXPIRED)
        if is_expired:
            forget(self._revealed or {})
        text, is_renewed = _first_line(error), self._renewed()
        if is_renewed or is_expired:
            return RetryableError(
                f"the store refused expired credentials for {place}: {text}",
                code="PEN-2001",
                hint="they are read again for the next try; see that whatever renews them runs",
            )
        return FatalError(
            f"the store refused access to {place}: {text}",
            code="PEN-5050",
            hint="check the keys in `storage_options`, and that they may list, read, write and delete there",
        )

    def failed(self, place: object, error: Exception) -> ConnectorError:
        """What an error of a client means, of this one or of another that uses the same library."""
        text = str(error)
        if any(mark in text for mark in _NO_BUCKET):
            return FatalError(
                f"there is no bucket or container {self.url}",
                code="PEN-5050",
                hint="make it, or correct `path`, `region` and `endpoint`",
            )
        if any(mark in text for mark in (*_EXPIRED, "403 Forbidden", "401 Unauthorized")):
            return self._refused(place, error)
        code = "PEN-2001"
        if any(mark in text for mark in _SLOW_DOWN):
            code = "PEN-2002"
        elif "timed out" in text or "timeout" in text.partition("max_retries")[0]:
            code = "PEN-2003"
        return RetryableError(f"the store failed at {place}: {_first_line(error)}", code=code)


@functools.cache
def library() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ConfigError(
            "object stores need the package obstore", code="PEN-1007", hint="pip install 'penstock[object-stores]'"
        ) from error
    return obstore


def _client(url: str, options: Mapping[str, str]) -> Any:
    stores, kind, address = library().store, kind_of(url), urlparse(url)
    config = {name: value for name, value in options.items() if name != "allow_http"}
    client_options = {"allow_http": allows_http(options), "connect_timeout": "5s", "timeout": "30s"}
    if kind == "az":
        container, _, host = address.netloc.partition("@")
        config.update({"account_name": host.partition(".")[0]} if host and "account_name" not in config else {})
        return stores.AzureStore(container, config=config, client_options=client_options, retry_config=_RETRIES)
    make = stores.S3Store if kind == "s3" else stores.GCSStore
    return make(address.netloc, config=config, client_options=client_options, retry_config=_RETRIES)


def _first_line(error: Exception) -> str:
    """What went wrong, on one line and without colours."""
    return " ".join(_COLOUR.sub("", str(error)).partition("Debug source")[0].split())[:500]


_COLOUR = re.compile(r"\x1b\[\d+m|↳")
