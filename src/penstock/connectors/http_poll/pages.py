"""The pages of a web API: how to ask for one, and which comes next."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urljoin

import httpx

from penstock.connectors.http_client import PASSING, KeyAuth, client, failure, passing, pause_of
from penstock.connectors.http_poll.config import ByCursor, ByLink, ByNextUrl, ByOffset, ByPage, HttpPollConfig
from penstock.durable import Json, canonical
from penstock.errors import NOT_READY, FatalError, RetryableError

PAGE_TIMEOUTS = 10
"""So many times `timeout_secs`, and a page that is still coming is given up."""

SETTLED_SECS = 60
"""`Last-Modified` counts whole seconds, and is not made in the moment in which the records are read."""


@dataclass(frozen=True)
class Marks:
    """What a page was marked with, to ask for it again only if it has changed."""

    etag: str = ""
    modified: str = ""


@dataclass(frozen=True)
class Page:
    """The records of a page, and what to ask for next."""

    records: list[Any]
    following: Json = None
    """None: it is the last page."""
    marks: Marks = Marks()
    unchanged: bool = False
    """It is as it was when it was marked; its records did not come."""


class Api:
    """The API as a client sees it: it keeps to the pauses that the server asks for."""

    def __init__(self, config: HttpPollConfig) -> None:
        self.waits = ""
        """Why the server is left alone; empty: it is not."""
        self._config = config
        self._client = client(config)
        self._wait_until = 0.0
        self._asked_for: set[str] = set()  # the pages of this round
        self._asked_at = 0.0

    def close(self) -> None:
        self._client.close()

    def page(self, at: Json, since: Json, marks: Marks) -> Page:
        """The page at a place, of records from a value on; an error while the server wants to be left alone."""
        config = self._config
        if time.monotonic() < self._wait_until:
            raise RetryableError(self.waits, code=NOT_READY)
        if config.rate_limit_per_sec is not None:
            time.sleep(max(0.0, self._asked_at + 1 / config.rate_limit_per_sec - time.monotonic()))
        self._asked_at = time.monotonic()
        url = self._target(at, since)
        asked = {"If-None-Match": marks.etag, "If-Modified-Since": marks.modified}
        headers = {name: value for name, value in asked.items() if value}
        answer, body = self._get(url, headers)
        pause = pause_of(answer)
        if answer.status_code in PASSING and pause is not None:
            self._wait_until = time.monotonic() + pause
            self.waits = f"{config.url} answered {answer.status_code} and asks to be left alone for {pause:.0f} s"
            raise RetryableError(self.waits, code=NOT_READY)
        self.waits = ""
        if answer.status_code == 304:
            if not headers:
                raise RetryableError(f"GET {config.url} was answered 304 Not Modified, which nobody had asked")
            return Page([], marks=marks, unchanged=True)
        if not answer.is_success:
            raise failure(answer, f"GET {config.url}")
        return self._read(answer, body, at)

    def _get(self, url: str | httpx.URL, headers: dict[str, str]) -> tuple[httpx.Response, bytes]:
        """An answer and its body, which may be packed so that it would fill all memory, or never end."""
        config = self._config
        until = time.monotonic() + PAGE_TIMEOUTS * config.timeout_secs
        body = bytearray()
        try:
            with self._client.stream("GET", url, headers=headers) as answer:
                for piece in answer.iter_bytes():
                    body += piece
                    if len(body) > config.max_page_bytes:
                        raise FatalError(
                            f"a page of {config.url} has over {config.max_page_bytes:,} bytes",
                            code="PEN-5001",
                            hint="ask for smaller pages, or raise max_page_bytes",
                        )
                    if time.monotonic() > until:
                        raise RetryableError(f"GET {config.url}: the page does not end", code="PEN-2003")
        except httpx.HTTPError as error:
            raise passing(error, f"GET {config.url}") from error
        return answer, bytes(body)

    def _target(self, page: Json, since: Json) -> str | httpx.URL:
        """The address to ask: that of the options with the parameters of this page, or the one that the server gave."""
        config = self._config
        if isinstance(page, str) and isinstance(config.pagination, ByLink | ByNextUrl):
            return page
        params: dict[str, Any] = dict(config.params)
        if config.incremental is not None and since is not None:
            params[config.incremental.param] = since
        match config.pagination:
            case ByCursor() as by:
                params |= {} if page is None else {by.param: page}
            case ByPage() as by:
                params |= {by.param: by.first if page is None else page}
                params |= {by.size_param: by.size} if by.size_param else {}
            case ByOffset() as by:
                params |= {by.param: page or 0, by.size_param: by.size}
        return httpx.URL(config.url).copy_merge_params(params) if params else config.url

    def _read(self, answer: httpx.Response, raw: bytes, at: Json) -> Page:
        config = self._config
        try:
            body = json.loads(raw)
            if b"\\ud" in raw.lower():  # half a surrogate pair is no text: it could not be stored or sent
                whole = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
                body = json.loads(whole.decode("utf-8", "replace"))
            records = member(body, config.records)
        except (ValueError, RecursionError):
            body = records = None
        if not isinstance(records, list):
            where = f"at {config.records!r}" if config.records else "at its top"
            raise RetryableError(f"{config.url} has no list of records {where}", hint="correct `records`")
        following = self._next(answer, body, at, len(records))
        if at is None:
            self._asked_for.clear()
        self._asked_for.add(canonical(at))
        if following is not None and canonical(following) in self._asked_for:
            raise RetryableError(f"{config.url} names the same page again and again", hint="look at `pagination`")
        return Page(records, following, Marks(answer.headers.get("ETag", ""), _settled(answer.headers)))

    def _next(self, answer: httpx.Response, body: Any, page: Any, count: int) -> Json:
        match self._config.pagination:
            case ByCursor() as by:
                return member(body, by.path) or None
            case ByPage() as by:
                return (by.first if page is None else page) + 1 if count >= (by.size or 1) else None
            case ByOffset() as by:
                return (page or 0) + count if count >= by.size else None
            case ByLink():
                return self._own_address(answer, answer.links.get("next", {}).get("url"))
            case ByNextUrl() as by:
                return self._own_address(answer, member(body, by.path))
        return None

    def _own_address(self, answer: httpx.Response, found: Any) -> str | None:
        """An address on the same server: nobody else gets our credentials."""
        if not found:
            return None
        try:
            url = httpx.URL(urljoin(str(answer.request.url), str(found)))
        except (ValueError, httpx.InvalidURL):
            raise RetryableError(
                f"{self._config.url} names a next page whose address is none", hint="look at `pagination`"
            ) from None
        own = httpx.URL(self._config.url)
        if url.userinfo != own.userinfo or (url.scheme, url.host, url.port) != (own.scheme, own.host, own.port):
            raise FatalError(
                f"{self._config.url} names a next page on another server",
                code="PEN-5001",
                hint="set `url` to the server that has the pages",
            )
        auth = self._config.auth
        # Where a page is kept, no secret may be: the parameter is set again with each request.
        return str(url.copy_remove_param(auth.param) if isinstance(auth, KeyAuth) and auth.param else url)


def _settled(headers: httpx.Headers) -> str:
    """`Last-Modified`, if it is so old that nothing else can have changed in the same second; else nothing."""
    given = headers.get("Last-Modified", "")
    try:
        changed, now = map(parsedate_to_datetime, (given, headers.get("Date", "")))
        return given if (now - changed).total_seconds() >= SETTLED_SECS else ""
    except (ValueError, TypeError, OverflowError):  # one of them is missing, or is no date
        return ""


def member(value: Any, path: str) -> Any:
    """The member at a path such as `data.items`; None if there is none. An empty path is the value itself."""
    for name in path.split(".") if path else ():
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict):
            value = value.get(name)
        else:
            return None
    return value
