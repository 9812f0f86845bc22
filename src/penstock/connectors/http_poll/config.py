"""The options of the http_poll source."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from penstock.config import Config
from penstock.connectors.http_client import HttpConfig


class ByCursor(Config):
    type: Literal["cursor"]
    """`"cursor"`: each page says what to ask for next."""

    path: str = "next_cursor"
    """Where a page says it; nothing there, or null: it is the last one."""

    param: str = "cursor"
    """The parameter that it is sent as."""


class ByPage(Config):
    type: Literal["page"]
    """`"page"`: pages have numbers. An empty one is the last, and with `size` one that is not full."""

    param: str = "page"
    """The parameter that holds the number."""

    first: int = 1
    """The number of the first page."""

    size_param: str | None = None
    """The parameter that asks for `size` records."""

    size: PositiveInt | None = None
    """Records of a full page: no more than the server gives at most, or its first page is taken for the last."""


class ByOffset(Config):
    type: Literal["offset"]
    """`"offset"`: a page begins at a number of records. One that is not full is the last."""

    param: str = "offset"
    """The parameter that holds the number."""

    size_param: str = "limit"
    """The parameter that asks for `size` records."""

    size: PositiveInt = 100
    """Records of a full page: no more than the server gives at most, or its first page is taken for the last."""


class ByLink(Config):
    type: Literal["link"]
    """`"link"`: the header `Link` has the address of the next page, with `rel="next"`."""


class ByNextUrl(Config):
    type: Literal["next_url"]
    """`"next_url"`: each page has the address of the next one."""

    path: str = "next"
    """Where; nothing there, or null: it is the last one."""


Pagination = Annotated[ByCursor | ByPage | ByOffset | ByLink | ByNextUrl, Field(discriminator="type")]


class Incremental(Config):
    """What is newer than the newest record so far."""

    path: str = "updated_at"
    """The member of a record that grows: a number, also as text; a time in ISO 8601; or another text that sorts."""

    param: str = "since"
    """The parameter that asks for records from a value on. The API may give records of just that value again, or leave
    them out; older ones are passed over."""

    start: str | None = None
    """The value to begin with; none: the parameter is left out at first."""


class HttpPollConfig(HttpConfig):
    identity: ClassVar[frozenset[str]] = frozenset({"stream", "key", "deletes"})

    stream: str = Field(min_length=1)
    """The stream of the records."""

    params: dict[str, str] = Field(default_factory=dict)
    """Parameters of every request, beside those in `url`. The address of a next page is taken as the server gives it."""

    records: str = ""
    """Where a page has its list of records, such as `data.items`; empty: the page is the list."""

    pagination: Pagination | None = None
    """How pages follow each other: a table whose `type` is `"cursor"`, `"page"`, `"offset"`, `"link"` or `"next_url"`; none:
    there is one page."""

    key: tuple[str, ...] = ()
    """The members that tell records apart, such as `["id"]`; none: the whole record."""

    incremental: Incremental | None = None
    """Ask only for newer records: `path`, `param`, `start`; `key` breaks ties. None: all are read each time, and those that
    are new or have changed are sent."""

    deletes: bool = False
    """Of all that is read each time, also send what is gone. Records come as change envelopes then: give their topic
    `schema_type = "debezium"`."""

    allow_empty: bool = False
    """Take an empty answer for the end of all records; else, where `deletes` is set, it is taken for a failure."""

    interval_secs: PositiveFloat = 60
    """Time between two rounds through all pages."""

    max_page_bytes: PositiveInt = 64 << 20
    """Largest page, unpacked. Memory is needed for several times as much."""

    rate_limit_per_sec: Annotated[PositiveFloat, Field(ge=0.2)] | None = None
    """Requests a second at most."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.deletes and (self.incremental is not None or not self.key):
            raise ValueError("deletes needs a key, and all records each time: leave out incremental")
        if self.incremental is not None and not self.key:
            raise ValueError("incremental needs a key, which tells records with the same value apart")
        return self
