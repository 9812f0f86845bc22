"""
Every error Penstock raises, chosen by what should happen next.

    ConnectorError
    ├── ConfigError      refuse to start
    ├── RetryableError   back off and go on
    │   ├── StagingLost  stage that sink again from the range, which is not yet acked
    │   └── PlanStale    plan that topic's work again: the target moved on since
    ├── DataError        stop or skip, by `on_error`
    ├── SchemaError      stop for a decision, or evolve, by policy
    └── FatalError       stop
        ├── Fenced       another run owns the target
        └── RangeGone    give up the range, and plan again from its start
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar
from urllib.parse import quote, quote_plus

CODES: dict[str, str] = {
    "PEN-1000": "the configuration cannot be used",
    "PEN-1001": "the file is not valid TOML",
    "PEN-1002": "unknown key",
    "PEN-1003": "a value has the wrong type or is out of bounds",
    "PEN-1004": "a required key is missing",
    "PEN-1005": "a secret cannot be resolved",
    "PEN-1006": "unknown connector or format",
    "PEN-1007": "the extra of a connector or format is not installed",
    "PEN-1008": "the delivery guarantee cannot be met",
    "PEN-1009": "not supported yet",
    "PEN-1010": "a route is wrong",
    "PEN-1011": "two streams meet in one target",
    "PEN-1012": "a route's SQL is wrong",
    "PEN-1013": "the file changed in a way that needs a reset",
    "PEN-1014": "Java is missing or too old",
    "PEN-1015": "the file cannot be read",
    "PEN-1016": "the connector refused its settings",
    "PEN-1017": "a route's SQL works per epoch and does not say so",
    "PEN-1018": "no route takes a stream's rows",
    "PEN-1020": "a topic's schema is wrong",
    "PEN-1030": "the schema registry refused the credentials",
    "PEN-1031": "the schema registry does not have a subject or version",
    "PEN-1032": "the schema registry cannot be used as it is set up",
    "PEN-1040": "the object store ignores conditional writes",
    "PEN-1050": "this version of Spark does not serve",
    "PEN-1051": "an executor lacks what a run needs",
    "PEN-1052": "a streaming query changed in a way that its state does not allow",
    "PEN-2000": "a passing failure",
    "PEN-2001": "the connection broke",
    "PEN-2002": "rate limited",
    "PEN-2003": "timed out",
    "PEN-2004": "staged data is gone",
    "PEN-2005": "another writer committed to the target first",
    "PEN-2006": "the engine lost a task",
    "PEN-2007": "the system is not ready yet",
    "PEN-3000": "bad data",
    "PEN-3001": "a record cannot be decoded",
    "PEN-3002": "more records failed than max_error_rate allows",
    "PEN-3003": "a route's SQL failed on a row",
    "PEN-3004": "a file changed after it was planned",
    "PEN-3006": "a table cannot be read",
    "PEN-3030": "a message names a schema that the registry does not have",
    "PEN-4000": "a schema does not fit",
    "PEN-4001": "a column changed in a way the target cannot follow",
    "PEN-4002": "the target was not made for these rows",
    "PEN-4003": "SQL needs a value that a change does not carry",
    "PEN-4030": "a schema does not fit the earlier versions of its subject",
    "PEN-4031": "a schema is not valid",
    "PEN-5000": "a failure that needs a person",
    "PEN-5001": "the system cannot be reached",
    "PEN-5002": "the state directory is in use",
    "PEN-5003": "the state directory belongs to another pipeline",
    "PEN-5004": "a manifest is corrupt",
    "PEN-5005": "the journal is corrupt",
    "PEN-5006": "the state was written by a newer Penstock",
    "PEN-5007": "the target was written by another incarnation",
    "PEN-5008": "fenced: another run committed to the target",
    "PEN-5009": "the disk refused a write",
    "PEN-5010": "the target is gone",
    "PEN-5011": "the source cannot go back to the recorded position",
    "PEN-5012": "an unexpected failure",
    "PEN-5013": "too many retries",
    "PEN-5014": "Spark is gone",
    "PEN-5015": "a planned range can never be read again",
    "PEN-5016": "a task cannot see the journal",
    "PEN-5020": "a target's own record of its epochs is lost or corrupt",
    "PEN-5021": "a target cannot be rewritten for a wider type",
    "PEN-5030": "a source's change stream cannot be understood",
    "PEN-5040": "the embedded schema registry is damaged",
    "PEN-5050": "the object store refused access",
}
"""What each code means, for people; `docs/errors.md` is generated from it. The first digit names the class."""

ENGINE_GONE = "PEN-5014"
"""The code of an error that says that what runs tasks has ended."""

NOT_READY = "PEN-2007"
"""The code of a system that answers but takes no work yet (it is starting up): also a first `open` is tried again."""

_CODE = re.compile(r"PEN-\d{4}")

_secrets: set[str] = set()


def keep_secret(text: str) -> None:
    """
    No error shows `text` from now on: a client's own message may well hold the password that it was given.

    It may hold it as it travelled, too: in an address, or in JSON.
    """
    if len(text) > 3:  # a shorter one would tear every message apart
        _secrets.update((text, quote(text), quote(text, safe=""), quote_plus(text)))
        _secrets.update(json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False))


def keep_credentials(user: str, password: str) -> None:
    """No error shows these, as HTTP's basic authentication sends them."""
    keep_secret(base64.b64encode(f"{user}:{password}".encode()).decode())


def without_secrets(text: str) -> str:
    """The text with every secret that this process has revealed left out."""
    for secret in sorted(_secrets, key=len, reverse=True):  # one may begin with another
        text = text.replace(secret, "…")
    return text


_TAILS = re.compile(
    r"(got \d+|would lose data|data loss|parse value): .*|(Could not convert ).*?(?= with type )", re.DOTALL
)
_QUOTED = re.compile(
    r"(column '(?:[^'\\]|\\.)*')|'(?:[^'\\]|\\.)*'|((?:^|\W)[Vv]alue )[^\s.…'][^\s]*|(\] )[-+]?\d[^\s]*"
)
"""How Arrow and Spark quote values of rows in their messages; the groups are what is kept."""


def printable(text: str) -> str:
    """The text on one line: a name that holds a line break or an escape code must not pass for a finding."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def reason_of(error: object) -> str:
    """The first line of a library's message without the row values that it quotes: errors end up in logs and manifests."""
    text = _TAILS.sub(lambda found: found[1] or f"{found[2]}…", str(error).strip())  # a value may hold line breaks
    return _QUOTED.sub(lambda found: found[1] or f"{found[2] or found[3] or ''}…", text.partition("\n")[0])


class Action(StrEnum):
    """What the runtime does about an error."""

    REFUSE = "refuse"
    RETRY = "retry"
    RESTAGE = "restage"
    POLICY = "policy"
    STOP = "stop"


class ConnectorError(Exception):
    """Root of all errors. The message begins with the code, since a worker's exception reaches the driver as text."""

    default_code: ClassVar[str] = "PEN-5000"

    def __init__(self, message: str, *, code: str | None = None, hint: str = "") -> None:
        self.code = code or self.default_code
        assert self.code in CODES, f"{self.code} is not in errors.CODES"
        self.message = without_secrets(message)
        self.hint = without_secrets(hint)
        super().__init__(f"{self.code} {self.message}" + (f"\n  → {self.hint}" if self.hint else ""))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.code, self.hint)


class ConfigError(ConnectorError):
    """A wrong setting: refuse to start."""

    default_code = "PEN-1000"


class RetryableError(ConnectorError):
    """Network, rate limit, timeout: back off and go on."""

    default_code = "PEN-2000"


class StagingLost(RetryableError):
    """A sink's staged data is gone: that sink is staged again from the range."""

    default_code = "PEN-2004"


class PlanStale(RetryableError):
    """The target is no longer at the version that `plan_apply` saw: that topic is planned again."""

    default_code = "PEN-2005"


@dataclass(frozen=True)
class BadRecord:
    """A record that a source could not read."""

    data: bytes
    """As it was found."""
    where: str
    reason: str


class DataError(ConnectorError):
    """Records that cannot be used: stop, skip or keep them apart, by `on_error`."""

    default_code = "PEN-3000"
    count = 1
    """How many records; a source that yields the good rows first and then raises sets it."""
    rows: Sequence[int] = ()
    """Which rows of the batch, if a sink knows; else the runtime finds them by halves."""
    others_written = False
    """True: the sink took every row of the batch but `rows`, and must not be given the others again."""
    samples: Sequence[str] = ()
    """The first few of several records: where each is and what is wrong with it, without its values."""

    stream: str = ""
    records: Sequence[BadRecord] = ()
    """The records themselves, and their stream, if a source has all of them: they can be kept as dead letters then."""

    def __reduce__(self) -> tuple[object, ...]:
        kept = {name: tuple(getattr(self, name)) for name in ("rows", "samples", "records")}
        state = {"count": self.count, "stream": self.stream, "others_written": self.others_written}
        return (*super().__reduce__(), {**state, **kept})


class SchemaError(ConnectorError):
    """Rows and target disagree: stop for a decision or evolve, by policy."""

    default_code = "PEN-4000"


class FatalError(ConnectorError):
    """Only a person can go on from here."""

    default_code = "PEN-5000"


class Fenced(FatalError):
    """Another run committed to the target; this one must not write."""

    default_code = "PEN-5008"


class RangeGone(FatalError):
    """
    A planned range can never be read again, and the source can go on from its start without it.

    Raised by `split` or `read` of a range source. The epoch is closed with an empty range, and the next one is planned.
    """

    default_code = "PEN-5015"


ACTIONS: dict[type[ConnectorError], Action] = {
    StagingLost: Action.RESTAGE,
    ConfigError: Action.REFUSE,
    RetryableError: Action.RETRY,
    DataError: Action.POLICY,
    SchemaError: Action.STOP,
    FatalError: Action.STOP,
}
"""The one place that says what happens next; looked up along the class's bases."""


def action(error: BaseException) -> Action:
    """What to do about `error`; anything that is not ours stops the pipeline."""
    return next((ACTIONS[kind] for kind in type(error).__mro__ if kind in ACTIONS), Action.STOP)


def is_of_stream(error: ConnectorError) -> bool:
    """True for what is wrong with one stream's rows, name or place: who can leave that stream out goes on with the others."""
    return isinstance(error, DataError | SchemaError) or error.code in ("PEN-1010", "PEN-1011", "PEN-1018")


def from_text(text: str) -> ConnectorError | None:
    """The error whose code is in a worker's traceback, or None if there is none."""
    codes = [match for match in _CODE.finditer(text) if match.group() in CODES]
    if not codes:
        return None
    found = codes[-1]  # a traceback names the innermost cause first and the error that was raised last
    code = found.group()
    message, _, rest = text[found.end() :].strip().partition("\n")
    hint = rest.strip().removeprefix("→ ").partition("\n")[0] if rest.lstrip().startswith("→") else ""
    special: dict[str, type[ConnectorError]] = {"PEN-2004": StagingLost, "PEN-5008": Fenced, "PEN-5015": RangeGone}
    kinds: dict[str, type[ConnectorError]] = {
        "1": ConfigError,
        "2": RetryableError,
        "3": DataError,
        "4": SchemaError,
        "5": FatalError,
    }
    kind = special.get(code) or kinds[code[4]]
    return kind(message, code=code, hint=hint)


def _rebuild(kind: type[ConnectorError], message: str, code: str, hint: str) -> ConnectorError:
    return kind(message, code=code, hint=hint)
