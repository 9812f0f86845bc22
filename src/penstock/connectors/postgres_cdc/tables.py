"""
The life of one captured table, as the position keeps it: one class per state, and its transitions as methods.

    Waiting ──▶ Copying ──▶ Following         a table is copied, then followed
       ▲            │           │
       └────────────┴───────────┘  again()    it must be copied once more
    any state ──▶ Paused, Skipped             somebody asked for it
    any state ──▶ Failed ──▶ Waiting          it failed; it is tried again later
    any state ──▶ Gone   ──▶ Waiting          it is not in the database any more; it came back

The names in `state` are those of the stored position, which earlier versions wrote too: `seeding` is `Copying`, `seeded` is
`Following`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.connectors.postgres_cdc.partitions import Tree
from penstock.connectors.postgres_cdc.shape import StoredShape
from penstock.tables import Refused

RETRY_SECS = 10.0
"""Pause before a failed table is tried again; it doubles with each failure in a row."""
MOST_RETRY_SECS = 600.0

Key = tuple[str, ...]
"""The values of a key as the server's text."""

_EVER_STORED = frozenset(
    {"oid", "state", "shape", "key", "published", "copies", "refresh", "rows"}
    | {"estimate", "failure", "until_xid", "from_lsn", "frontier", "tree"}
)
"""Fields that earlier versions stored for every state, also for states where they mean nothing."""


class Value(BaseModel):
    """A part of the position."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Failure(Value):
    """Why a table is set aside."""

    code: str
    message: str
    hint: str = ""
    since: float
    """When it failed first, in seconds since 1970."""
    tries: int = 1
    next_try: float | None = None
    """When it is copied again, in seconds since 1970; None: when somebody asks for it."""


S = TypeVar("S", bound="_State")


class _State(Value):
    oid: int
    copies: int = 1
    """Number of its copy, 0 if it was never copied. From the second on, the first rows of a copy clear the target."""
    rows: int = 0
    """Rows that were copied."""
    estimate: int | None = None
    """Rows that the server thought it had when the copy began."""
    remains: Literal["", "part", "clearing", "cleared", "kept"] = ""
    """
    What the targets hold of a copy that is not complete when a range starts.

    `part`: some of its rows; if the table is set aside, the next range clears them, and ends with `clearing`. `cleared`: it
    did. `kept`: a sink refused to be cleared.
    """

    captured: ClassVar[bool] = False
    """True if its changes are followed, now or once it is copied."""

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_versions(cls, stored: Any) -> Any:
        if isinstance(stored, Mapping):
            return {
                name: value for name, value in stored.items() if name in cls.model_fields or name not in _EVER_STORED
            }
        return stored

    def become(self, state: type[S], **fields: Any) -> S:
        """The next state, with everything that it shares with this one."""
        shared = {name: getattr(self, name) for name in state.model_fields if name != "state" and hasattr(self, name)}
        return state.model_construct(**{**shared, **fields})

    def paused(self) -> Paused:
        return self.become(Paused)

    def skipped(self) -> Skipped:
        return self.become(Skipped)

    def gone(self) -> Gone:
        return self.become(Gone)

    def failed(self, refused: Refused, *, retried: bool = True) -> Failed:
        """Set aside; the pauses between two tries grow. Not `retried`: until somebody asks for it."""
        before: Failure | None = getattr(self, "failure", None)
        tries = before.tries + 1 if before else 1
        pause = min(MOST_RETRY_SECS, RETRY_SECS * 2.0 ** min(tries - 1, 20))
        failure = Failure(
            code=refused.code,
            message=refused.message,
            hint=refused.hint,
            since=before.since if before else refused.at,
            tries=tries,
            next_try=refused.at + pause if retried else None,
        )
        return self.become(Failed, failure=failure, remains="part" if self.remains == "kept" else self.remains)


class _Captured(_State):
    """Its changes are followed, now or once it is copied."""

    captured: ClassVar[bool] = True

    shape: StoredShape = None
    """What its columns looked like, see `CurrentShape.differs_from`; None in positions from before there were shapes."""
    key: tuple[str, ...] = ()
    """The key that identified its rows; with another key it is another table."""
    published: str = ""
    """How it was published when it was copied, see `Publication.mark`. If the mark is another now, changes were lost."""
    refresh: bool = False
    """The copy overwrites rows in place: no change was missed, so nothing is cleared and every change is applied."""
    failure: Failure | None = None
    """Why it failed last; kept until a copy is complete."""
    tree: Tree | None = None
    """Partitions the target's rows came from (or, before a clearing copy, will come from). None until first looked up."""
    left_out: tuple[str, ...] = ()
    """Generated columns that the server does not publish; for `penstock tables show`."""

    def with_fields(self, **fields: Any) -> Self:
        """The same state with some fields replaced."""
        return self.model_copy(update=fields)

    def again(self) -> Waiting:
        """Copy it once more, beginning with a clear."""
        remains = "part" if isinstance(self, Copying) else self.remains
        return self.become(Waiting, copies=max(self.copies, 1) + 1, rows=0, refresh=False, remains=remains)

    def restarted(self) -> Copying:
        """Begin its copy again from the first key; the target was just emptied by a row of the log."""
        return self.become(Copying, rows=0, frontier=None, remains="")

    def copied_up_to(self, frontier: Key | None) -> Copying | Following:
        """Its copy reaches this key; None: it is complete."""
        return self.become(Following) if frontier is None else self.become(Copying, frontier=frontier)


class Waiting(_Captured):
    """It is to be copied, but not yet."""

    state: Literal["waiting"] = "waiting"
    until_xid: int = 0
    """Transactions below this number may have written before the table was published, and must end first."""
    from_lsn: int = 0
    """The log must have been read up to here first, or earlier changes would be applied after the copy."""

    @property
    def clears(self) -> bool:
        """True if its first rows come with a clear of the target."""
        return self.copies > 1 and not self.refresh


class Copying(_Captured):
    """Its rows are copied in the order of its key; changes of keys up to the frontier are applied."""

    state: Literal["seeding"] = "seeding"
    frontier: Key | None = None
    """The last key that was copied; None: none yet."""


class Following(_Captured):
    """Its copy is complete, or it needs none; its changes are applied."""

    state: Literal["seeded"] = "seeded"


class Paused(_State):
    """Somebody paused it; `resume` copies it again."""

    state: Literal["paused"] = "paused"
    failure: ClassVar[None] = None


class Skipped(_State):
    """Somebody skipped it; only `resync` brings it back."""

    state: Literal["skipped"] = "skipped"
    failure: ClassVar[None] = None


class Failed(_State):
    """It is set aside; it is copied again when the pause is over."""

    state: Literal["failed"] = "failed"
    failure: Failure | None = None
    """None only in positions that were written without it."""

    def is_due(self, now: float) -> bool:
        """True if it is time to try it again."""
        due = self.failure.next_try if self.failure else 0.0
        return due is not None and now >= due

    def cleared(self) -> Failed:
        """The same at the end of a range that clears its targets."""
        return self.model_copy(update={"remains": "clearing", "copies": max(self.copies, 1) + 1})


class Gone(_State):
    """It is not in the database any more, or not chosen any more; if it comes back, it is copied again."""

    state: Literal["gone"] = "gone"
    failure: ClassVar[None] = None


TableProgress = Annotated[
    Waiting | Copying | Following | Paused | Skipped | Failed | Gone, Field(discriminator="state")
]
"""What is done with one table, and how far its copy is."""

Captured = Waiting | Copying | Following

SHOWN: Mapping[str, Literal["active", "seeding", "paused", "skipped", "failed", "gone"]] = {
    "waiting": "seeding",
    "seeding": "seeding",
    "seeded": "active",
    "paused": "paused",
    "skipped": "skipped",
    "failed": "failed",
    "gone": "gone",
}
"""The states as `penstock tables` shows them."""
