"""The states of captured tables, their shapes and the position, without a server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from penstock.connectors.postgres_cdc.health import table_states
from penstock.connectors.postgres_cdc.log.slot import Server, Slot, verify_confirmed, verify_range
from penstock.connectors.postgres_cdc.position import LeftOut, LogPosition
from penstock.connectors.postgres_cdc.shape import ColumnMark, CurrentShape, Reason, Shape, TypeMark, digest
from penstock.connectors.postgres_cdc.source import _bounded
from penstock.connectors.postgres_cdc.tables import (
    Copying,
    Failed,
    Following,
    Gone,
    Paused,
    Skipped,
    Waiting,
)
from penstock.connectors.postgresql import failures
from penstock.errors import ConfigError, ConnectorError, RetryableError
from penstock.source import ReadLimit
from penstock.tables import CopyAgain, Refused

RECORDED = (Path(__file__).parent / "recorded_position.json").read_text()
"""A position as the version before the states were classes wrote it, with a table in every state."""

REFUSED = Refused(stream="public.t", at=1000.0, code="PEN-3006", message="no", hint="do")


def test_a_drain_that_began_before_there_was_a_slot_ends_no_range_before_its_start():
    """Its first copy was recorded at 0/0, and every later start said that the slot had been advanced."""
    start, until = LogPosition(lsn=7), LogPosition(slots=0)
    assert _bounded(start, start.model_copy(update={"quiet": True}), ReadLimit(until=until), 0).lsn == 7


class TestRecordedPositions:
    def test_every_state_of_a_recorded_position_becomes_its_class(self):
        tables = LogPosition.model_validate_json(RECORDED).tables
        assert {stream.removeprefix("public."): type(table) for stream, table in tables.items()} == {
            "orders": Copying,
            "events": Waiting,
            "a": Paused,
            "b": Skipped,
            "c": Gone,
            "d": Failed,
            "e": Following,
        }
        assert tables["public.orders"].frontier == ("8",)
        assert tables["public.events"].until_xid == 764
        assert tables["public.events"].tree.parts == {16404: (755, 16404)}
        assert tables["public.d"].failure.next_try == 1010.0
        assert tables["public.e"].refresh

    def test_what_a_state_still_has_is_stored_as_before(self):
        recorded = json.loads(RECORDED)
        stored = json.loads(LogPosition.model_validate_json(RECORDED).model_dump_json())
        for stream, table in stored["tables"].items():
            for later in ("left_out", "remains"):
                table.pop(later, None)
            assert table.items() <= recorded["tables"][stream].items(), stream
        assert {**stored, "tables": {}, "refused": {}} == {**recorded, "tables": {}, "refused": {}}

    def test_a_position_is_the_same_after_it_was_stored(self):
        position = LogPosition.model_validate_json(RECORDED)
        assert LogPosition.model_validate_json(position.model_dump_json()) == position

    def test_a_field_that_no_version_ever_stored_is_refused(self):
        changed = json.loads(RECORDED)
        changed["tables"]["public.a"]["froniter"] = None
        with pytest.raises(ValueError, match="froniter"):
            LogPosition.model_validate(changed)

    def test_a_position_from_before_there_were_shapes_has_none(self):
        (table,) = LogPosition.model_validate({"tables": {"t": {"oid": 1, "state": "seeded"}}}).tables.values()
        assert table == Following(oid=1)
        assert table.shape is None


class TestTransitions:
    def test_a_copy_goes_from_waiting_through_its_frontier_to_following(self):
        waiting = Waiting(oid=1, copies=2, until_xid=7, from_lsn=9, key=("id",))
        assert waiting.clears
        copying = waiting.copied_up_to(("4",))
        assert (type(copying), copying.frontier, copying.copies, copying.key) == (Copying, ("4",), 2, ("id",))
        assert type(copying.copied_up_to(None)) is Following

    def test_a_refresh_clears_nothing(self):
        assert not Waiting(oid=1, copies=2, refresh=True).clears

    @pytest.mark.parametrize("state", [Waiting(oid=1), Copying(oid=1, frontier=("4",)), Following(oid=1)])
    def test_another_copy_waits_with_the_next_number_and_clears(self, state):
        again = state.with_fields(rows=5, refresh=True).again()
        assert (type(again), again.copies, again.rows, again.refresh, again.clears) == (Waiting, 2, 0, False, True)

    @pytest.mark.parametrize("state", [Waiting(oid=1), Copying(oid=1), Following(oid=1), Paused(oid=1), Gone(oid=1)])
    def test_every_state_can_fail_and_then_knows_nothing_of_its_copy(self, state):
        failed = state.failed(REFUSED)
        assert (type(failed), failed.oid, failed.failure.next_try) == (Failed, 1, 1010.0)
        assert not failed.captured
        assert not hasattr(failed, "frontier")
        assert failed.is_due(1010.0)
        assert not failed.is_due(1009.0)

    def test_without_retries_a_table_is_tried_when_somebody_asks(self):
        assert not Following(oid=1).failed(REFUSED, retried=False).is_due(1e18)

    def test_the_notes_of_a_range_move_its_tables(self):
        position = LogPosition(
            lsn=100,
            tables={
                "reset": Following(oid=1, rows=9),
                "again": Following(oid=2),
                "public.t": Copying(oid=3, frontier=("1",)),
                "paused": Paused(oid=4),
            },
        )
        notes = [
            {"quiet": False, "reset": ["reset", "paused"], **CopyAgain(streams=("again", "paused", "unknown")).note()},
            {"copied": {"stream": "public.t", "upto": ["1"], "snapshot": "7:7:", "lsn": 200}, "rows": 1},
            REFUSED.note(),
        ]
        after = position.after(notes, retried=True, whole=1_000)
        assert after.tables["reset"] == Copying(oid=1)
        assert after.tables["again"] == Waiting(oid=2, copies=2)
        assert type(after.tables["public.t"]) is Failed
        assert after.tables["paused"] == Paused(oid=4)
        assert after.copied == (), "chunks of a failed table do not count"
        assert after.settled == 100

    @pytest.mark.parametrize(
        ("state", "remains"),
        [
            (Waiting(oid=1), ""),
            (Copying(oid=1, rows=5, frontier=("5",), remains="part"), "part"),
            (Copying(oid=1, rows=5, frontier=("5",), refresh=True), ""),
            (Following(oid=1, rows=5, remains="part"), "part"),
            (Following(oid=1, rows=5), ""),
            (Waiting(oid=1, copies=2, remains="cleared"), "cleared"),
            (Waiting(oid=1, copies=2, remains="kept"), "part"),
        ],
    )
    def test_a_table_that_is_refused_in_the_middle_of_its_copy_leaves_a_part(self, state, remains):
        after = LogPosition(lsn=100, tables={"public.t": state}).after([REFUSED.note()], retried=True, whole=1_000)
        assert (type(after.tables["public.t"]), after.tables["public.t"].remains) == (Failed, remains)
        assert after.tables["public.t"].is_due(1010.0)

    def test_a_copy_is_a_part_until_the_log_has_passed_its_chunks(self):
        chunk = {"copied": {"stream": "public.t", "upto": ["1"], "snapshot": "7:7:", "lsn": 200}, "rows": 1}
        position = LogPosition(lsn=100, tables={"public.t": Copying(oid=3, frontier=("1",))})
        position = position.after([chunk], retried=True, whole=1_000)
        assert position.tables["public.t"].remains == "part"
        position = position.with_table("public.t", position.tables["public.t"].copied_up_to(None))
        assert position.after([chunk], retried=True, whole=1_000).tables["public.t"].remains == "part"
        passed = position.model_copy(update={"lsn": 300})
        assert passed.after([chunk], retried=True, whole=1_000).tables["public.t"].remains == ""

    def test_a_clear_that_a_sink_refuses_is_said_and_tried_again_after_the_next_copy(self):
        failed = Copying(oid=1, rows=5, frontier=("5",), remains="part").failed(REFUSED)
        clearing = LogPosition(lsn=100, tables={"public.t": failed.cleared()})
        assert clearing.after([], retried=True, whole=1_000).tables["public.t"].remains == "cleared"
        kept = clearing.after([REFUSED.note()], retried=True, whole=1_000)
        assert kept.tables["public.t"].remains == "kept"
        assert "refuses to be cleared" in table_states(kept, copies=True)["public.t"].note
        assert kept.tables["public.t"].become(Waiting).failed(REFUSED).remains == "part"

    def test_what_the_targets_hold_is_also_said_after_a_new_copy_has_failed(self):
        again = Following(oid=1, copies=1, rows=7).failed(REFUSED).become(Waiting, copies=2, rows=0).failed(REFUSED)
        position = LogPosition(tables={"public.t": again})
        assert "hold what they did before it failed" in table_states(position, copies=True)["public.t"].note

    @pytest.mark.parametrize(
        ("rows", "code", "due"), [(999, "PEN-3002", True), (1_000, "PEN-3002", False), (1_000, "PEN-3006", True)]
    )
    def test_a_large_copy_that_was_refused_in_the_middle_waits_for_somebody(self, rows, code, due):
        table = Copying(oid=1, rows=rows, frontier=("5",), remains="part")
        note = REFUSED.model_copy(update={"code": code}).note()
        after = LogPosition(lsn=100, tables={"public.t": table}).after([note], retried=True, whole=1_000)
        assert after.tables["public.t"].is_due(1e18) is due

    def test_tables_that_cannot_be_captured_are_shown_with_the_reason_and_the_way_out(self):
        position = LogPosition(
            tables={"public.t": Following(oid=1, left_out=("area",)), "public.w": Waiting(oid=2, until_xid=70)},
            refused={"public.u": LeftOut(what="it is UNLOGGED", fix="ALTER TABLE u SET LOGGED")},
        )
        states = table_states(position, copies=True)
        assert list(states) == ["public.t", "public.u", "public.w"]
        assert states["public.u"].state == "left_out"
        assert (states["public.u"].error, states["public.u"].hint) == ("it is UNLOGGED", "ALTER TABLE u SET LOGGED")
        assert not states["public.u"].is_read
        assert states["public.t"].note == "left out, since generated: area"
        assert "70" in states["public.w"].note


NAME, TYPE = "aaaa", "1111"
OLD = Shape((ColumnMark(NAME, TYPE),), "10", "d1", "k1", (TypeMark(7, 1, digest("sad")),), (digest("secret"),))
NOW = {
    "columns": OLD.columns,
    "file": "10",
    "defined": "d1",
    "key": "k1",
    "types": OLD.types,
    "left_out": OLD.left_out,
    "members": {7: ("sad", "ok")},
}
DROPPED = ColumnMark("----", "----")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"file": "11"}, None),
        ({"defined": "d2"}, None),
        ({"columns": (DROPPED,)}, None),
        ({"columns": (*OLD.columns, ColumnMark("bbbb", "1111"))}, None),
        ({"left_out": (*OLD.left_out, digest("more"))}, None),
        ({"columns": (ColumnMark(NAME, "2222"),)}, Reason.COLUMN_CHANGED),
        ({"columns": (ColumnMark("bbbb", TYPE),)}, Reason.COLUMN_CHANGED),
        ({"columns": (DROPPED, ColumnMark(NAME, TYPE))}, Reason.COLUMN_CAME_BACK),
        ({"columns": (*OLD.columns, DROPPED, ColumnMark("bbbb", TYPE))}, Reason.COLUMN_CAME_BACK),
        ({"columns": (*OLD.columns, ColumnMark("bbbb", "1111")), "defaults": frozenset({2})}, Reason.COLUMN_FILLED),
        ({"file": "11", "defined": "d2"}, Reason.REWRITTEN),
        ({"members": {7: ("happy", "ok")}}, Reason.LABEL_RENAMED),
        ({"left_out": (), "captured": frozenset({digest("secret")})}, Reason.COLUMN_INCLUDED),
        ({"left_out": (*OLD.left_out, "inserts")}, Reason.INSERT_ONLY_CHANGED),
        ({"key": "k2"}, Reason.KEY_CHANGED),
    ],
)
def test_a_shape_names_the_reason_why_rows_must_be_copied_again(change, reason):
    assert CurrentShape(**{**NOW, **change}).differs_from(OLD) == reason


@pytest.mark.parametrize(
    ("change", "rekeyed"),
    [
        ({}, False),
        ({"file": "11"}, False),
        ({"keyed": "t1.d2"}, False),
        ({"file": "11", "keyed": "t1.d2"}, True),
        ({"keyed": "t2.d1"}, True),
        ({"file": "11", "defined": "d2"}, False),
    ],
)
def test_a_shape_says_whether_rows_may_have_other_keys(change, rekeyed):
    now = CurrentShape(**{**NOW, "keyed": "t1.d1", **change})
    assert now.rekeyed_since(replace(OLD, keyed="t1.d1")) is rekeyed
    assert now.rekeyed_since(OLD) is (now.file != OLD.file and now.defined != OLD.defined)


@pytest.mark.parametrize(
    "text",
    [
        "b80b98f1aad68e296f8f7f4b5ebe8e29:16389:b458655a:3af00f79:16385.2.194af90b:5ebe2294",
        "b80b3769:16429:2ca65f58:3af00f79::inserts",
        "b80b3769:16429:2ca65f58:3af00f79:::0cc175b9.92eb5ffe",
        "b80b3769--------:16429:2ca65f58:3af00f79",
        "b80b3769:16429:2ca65f58",
    ],
)
def test_a_stored_shape_is_read_and_written_as_it_is(text):
    assert str(Shape.parse(text)) == text


class TestMessages:
    here = Server("7", 2, 180000, "shop", "logical", 0x3000)
    slot = Slot("pgoutput", "shop", None, 0x1000, 0x1000, "reserved", None)

    def test_a_slot_that_was_moved_is_past_the_recorded_position_and_not_behind_it(self):
        with pytest.raises(failures.SlotLost) as raised:
            verify_confirmed(0x2000, "penstock", 0x1000)
        assert "advanced to 0/2000, past the recorded position 0/1000" in raised.value.message
        assert "behind" not in raised.value.message

    def test_another_timeline_is_called_a_failover_or_restore(self):
        with pytest.raises(
            failures.SlotLost, match=r"timeline 2 at 0/3000; .* 0/1000 on timeline 1 \(failover or restore\)"
        ):
            verify_range(self.slot, "penstock", self.here, 0x1000, "7", 1)

    @pytest.mark.parametrize(
        ("error", "kind", "begins"),
        [
            (psycopg.errors.NumericValueOutOfRange("integer out of range"), ConnectorError, "PostgreSQL refused: "),
            (psycopg.errors.InsufficientPrivilege("denied"), ConfigError, "PostgreSQL refused: "),
            (psycopg.errors.LockNotAvailable("lock timeout"), RetryableError, "PostgreSQL refused: "),
            (psycopg.errors.AdminShutdown("terminating"), RetryableError, "PostgreSQL closed the connection: "),
            (psycopg.OperationalError("server closed the connection"), RetryableError, "PostgreSQL does not answer: "),
        ],
    )
    def test_only_a_server_that_gave_no_answer_does_not_answer(self, error, kind, begins):
        with pytest.raises(kind) as raised, failures.errors(failures.NO_ANSWER):
            raise error
        assert raised.value.message.startswith(begins)
