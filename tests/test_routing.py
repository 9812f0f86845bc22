from __future__ import annotations

import pickle
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.pipeline.routing import Route, Router, Target, partition_of, split_by, topic_name
from penstock.schema import with_key
from penstock.source import SourceBatch


def router(*routes: Route, sinks: tuple[str, ...] = ("lake",), unrouted: str = "stop") -> Router:
    return Router(routes, sinks, unrouted)  # type: ignore[arg-type]


def topics(found: tuple[Target, ...]) -> list[str]:
    return [target.topic for target in found]


def messages(*attributes: dict[str, str] | None) -> pa.RecordBatch:
    rows = [None if each is None else list(each.items()) for each in attributes]
    return pa.record_batch(
        {"n": list(range(len(rows))), "attributes": pa.array(rows, pa.map_(pa.string(), pa.string()))}
    )


def routed(
    the: Router, records: pa.RecordBatch, stream: str = "s"
) -> list[tuple[str | None, tuple[str, ...], list[int]]]:
    return [
        (target and target.topic, target.sinks if target else (), rows.column("n").to_pylist())
        for target, rows in the.route("in", SourceBatch(records, stream=stream))
    ]


class TestPatterns:
    @pytest.mark.parametrize(
        ("pattern", "takes", "leaves"),
        [
            ("public.orders", ["public.orders"], ["public.orders2", "xpublic.orders", "publicXorders"]),
            ("public.*", ["public.orders", "public.a.b", "public."], ["other.orders", "public.a/b", "public"]),
            ("*", ["orders", ""], ["a/b"]),
            ("a*c", ["ac", "abc", "a.b.c"], ["abcd", "a/c"]),
            ("plant/+/temp", ["plant/1/temp", "plant//temp"], ["plant/temp", "plant/1/2/temp", "plant/1/temp/x"]),
            ("plant/#", ["plant", "plant/", "plant/1", "plant/1/2"], ["plants", "xplant/1"]),
            ("plant/line*/#", ["plant/line1", "plant/line1/x/y"], ["plant/other/x"]),
            ("+/+", ["a/b", "/b"], ["a", "a/b/c"]),
            ("#", ["", "a", "a/b", "new\nline"], []),
            ("a b.(c)", ["a b.(c)"], ["a b.c"]),
        ],
    )
    def test_a_pattern_takes_exactly_these_streams(self, pattern, takes, leaves):
        route = Route(pattern, "/t")
        assert [s for s in takes if route.topic("in", s) is None] == []
        assert [s for s in leaves if route.topic("in", s) is not None] == []

    @pytest.mark.parametrize(
        ("pattern", "values"),
        [
            ("public.orders", ["public.orders", "public_orders", "a public.orders", "public.orders\n"]),
            ("plant/+/*.t", ["plant/1/a.t", "plant/1/a.tt", "plant/1/2/a.t"]),
            ("plant/#", ["plant", "plant/1\n2", "plants"]),
            ("a b~#&-c", ["a b~#&-c"]),
            ("#", ["", "x\ny"]),
        ],
    )
    def test_attributes_and_streams_are_matched_alike(self, pattern, values):
        as_stream = [Route(pattern, "/t").topic("in", value) is not None for value in values]
        the = router(Route(match=(("a", pattern),), to="/t"), unrouted="skip")
        as_attribute = {
            n for topic, _, rows in routed(the, messages(*({"a": v} for v in values))) if topic for n in rows
        }
        assert as_attribute == {n for n, taken in enumerate(as_stream) if taken}

    @pytest.mark.parametrize("pattern", ["a+", "a/b#", "#/a", "a/#/b", "++"])
    def test_a_level_wildcard_that_is_no_whole_level_is_a_problem(self, pattern):
        assert len(Route(pattern, "/t").problems()) == 1

    @pytest.mark.parametrize("pattern", ["a", "*", "+", "#", "a/+/b/#", "a*b/c*"])
    def test_a_right_pattern_is_no_problem(self, pattern):
        assert Route(pattern, "/t").problems() == []

    def test_a_wrong_attribute_pattern_is_named_by_its_key(self):
        (problem,) = Route(match=(("site", "a+"),)).problems()
        assert "match.site" in problem


class TestTemplates:
    @pytest.mark.parametrize(
        ("pattern", "to", "stream", "topic"),
        [
            ("#", "/{stream}", "public.orders", "/public.orders"),
            ("#", "{stream}", "plant/1", "/plant/1"),
            ("#", "/{stream}", "/plant/1", "/plant/1"),
            ("*", "/lake/{schema}/{table}", "public.orders", "/lake/public/orders"),
            ("*", "/lake/{table}", "orders", "/lake/orders"),
            ("*", "/lake/{table}", "public.orders.old", "/lake/orders.old"),
            ("plant/+/line*/#", "/{1}/{2}/{3}", "plant/p/line7/a/b", "/p/7/a/b"),
            ("#", "/{source}/{stream}", "x", "/in/x"),
            ("#", "/all", "{table}", "/all"),
            ("#", "/{stream}", "{table}", "/{table}"),
        ],
    )
    def test_a_template_makes_this_topic(self, pattern, to, stream, topic):
        assert Route(pattern, to).topic("in", stream) == topic

    @pytest.mark.parametrize(
        "to", ["/{tabel}", "/{1}", "/{", "/a}", "/a//b", "/../a", "/a/./b", "", "/", "/a/", "_dead_letters"]
    )
    def test_a_wrong_template_is_a_problem_before_any_stream_is_known(self, to):
        assert Route("orders", to).problems()

    def test_an_unknown_placeholder_is_answered_with_the_known_ones(self):
        (problem,) = Route("a*", "/{tabel}").problems()
        assert "{tabel}" in problem
        assert "{table}" in problem
        assert "{1}" in problem

    @pytest.mark.parametrize("stream", ["../../etc", "a//b", ".", "a\x00b", "", "_dead_letters", "/_Dead_Letters"])
    def test_a_stream_whose_name_makes_no_topic_is_unrouted(self, stream):
        with pytest.raises(ConfigError, match=r"PEN-1018 .* makes no topic"):
            router().targets("in", stream)
        assert routed(router(unrouted="skip"), pa.record_batch({"n": [1]}), stream) == [(None, (), [1])]

    def test_a_topic_name_gets_its_slash(self):
        assert topic_name("lake/orders") == topic_name("/lake/orders") == "/lake/orders"


class TestExclude:
    ROUTES = (Route("public.*", "/{table}", exclude=("public.tmp_*", "public.log")),)

    def test_a_stream_that_is_excluded_is_not_taken(self):
        router = Router(self.ROUTES, ("lake",))
        assert [target.topic for target in router.targets("db", "public.orders")] == ["/orders"]
        assert router.targets("db", "public.tmp_1") == ()
        assert router.targets("db", "public.log") == ()

    def test_another_route_may_take_what_one_excludes(self):
        router = Router((*self.ROUTES, Route("public.tmp_*", "/scratch")), ("lake",))
        assert [target.topic for target in router.targets("db", "public.tmp_1")] == ["/scratch"]

    def test_a_wrong_pattern_is_a_problem(self):
        assert "`exclude` = 'a+'" in Route(exclude=("a+",)).problems()[0]


class TestTargets:
    def test_without_routes_every_stream_goes_to_its_own_name_and_all_sinks(self):
        (target,) = router(sinks=("a", "b")).targets("in", "public.orders")
        assert (target.topic, target.sinks) == ("/public.orders", ("a", "b"))

    def test_every_route_that_matches_applies(self):
        the = router(Route("public.*", "/lake/{table}"), Route("#", "/log"), Route("other", "/no"))
        assert topics(the.targets("in", "public.orders")) == ["/lake/orders", "/log"]

    def test_a_route_for_another_source_does_not_apply(self):
        the = router(Route("#", "/a", source="one"), Route("#", "/b", source="two"))
        assert topics(the.targets("two", "s")) == ["/b"]

    def test_two_routes_to_one_topic_lead_each_row_to_a_sink_once(self):
        the = router(Route("#", "/t", sinks=("a",)), Route("s", "/t", sinks=("a", "b")), sinks=("a", "b"))
        assert [(t.topic, t.sinks) for t in the.targets("in", "s")] == [("/t", ("a",)), ("/t", ("b",))]

    def test_it_travels_to_tasks_without_its_cache(self):
        the = router(Route("public.*", "/lake/{table}"))
        the.targets("in", "public.orders")
        copy = pickle.loads(pickle.dumps(the))
        assert copy == the
        assert copy._targets == {}
        assert copy.targets("in", "public.orders") == the.targets("in", "public.orders")

    def test_the_cache_does_not_grow_with_the_number_of_streams(self):
        the = router()
        for n in range(10_050):
            the.targets("in", f"s{n}")
        assert len(the._targets) <= 10_000


class TestRows:
    def test_rows_are_told_apart_by_attributes(self):
        the = router(
            Route(match=(("site", "north*"),), to="/north"),
            Route(match=(("site", "south"), ("kind", "+")), to="/south"),
            unrouted="skip",
        )
        rows = messages(
            {"site": "north-1"}, {"site": "south"}, {"site": "south", "kind": "t"}, {}, None, {"site": "north"}
        )
        assert routed(the, rows) == [("/north", ("lake",), [0, 5]), ("/south", ("lake",), [2]), (None, (), [1, 3, 4])]

    def test_rows_without_attributes_match_no_attribute(self):
        the = router(Route(match=(("site", "#"),), to="/t"), unrouted="skip")
        assert routed(the, pa.record_batch({"n": [1, 2]})) == [(None, (), [1, 2])]

    def test_a_row_that_two_routes_send_to_one_place_gets_there_once(self):
        the = router(
            Route(match=(("site", "a"),), to="/t", sinks=("x",)),
            Route(match=(("kind", "k"),), to="/t"),
            sinks=("x", "y"),
            unrouted="skip",
        )
        rows = messages({"site": "a"}, {"site": "a", "kind": "k"}, {"kind": "k"}, {})
        assert routed(the, rows) == [
            ("/t", ("x",), [0, 1]),
            ("/t", ("y",), [1, 2]),
            ("/t", ("x",), [2]),
            (None, (), [3]),
        ]

    def test_a_route_without_match_gets_the_batch_itself(self):
        rows = pa.record_batch({"n": [1]})
        ((_, passed),) = router().route("in", SourceBatch(rows, stream="s"))
        assert passed is rows

    def test_unrouted_rows_stop_the_pipeline_and_name_stream_and_nearest_route(self):
        the = router(Route("public.orders", "/a"), Route("zzz", "/b"))
        with pytest.raises(ConfigError, match=r"PEN-1018 .*'public.order'.*nearest is from = 'public.orders'"):
            list(the.route("in", SourceBatch(pa.record_batch({"n": [1]}), stream="public.order")))

    def test_a_row_that_no_match_takes_is_unrouted_too(self):
        the = router(Route(match=(("site", "a"),), to="/t"))
        with pytest.raises(ConfigError, match="PEN-1018 no route takes some rows"):
            list(the.route("in", SourceBatch(messages({"site": "a"}, {}), stream="s")))

    def test_no_rows_are_no_reason_to_stop(self):
        the = router(Route("other", "/t"))
        assert list(the.route("in", SourceBatch(pa.record_batch({"n": pa.array([], pa.int64())}), stream="s"))) == []


class TestPartitions:
    def test_values_are_pinned_for_ever(self):
        batch = pa.record_batch(
            {
                "i": [0, 1, -1, 1 << 62],
                "s": ["", "a", "ab", "orders"],
                "f": [0.0, 1.5, -2.0, 1e300],
                "t": pa.array([0, 1, 2, 1_700_000_000_000_000], pa.timestamp("us", "UTC")),
            }
        )
        assert {name: partition_of(batch, [name], 1000).tolist() for name in batch.schema.names} == PINNED
        assert partition_of(batch, ["i", "s"], 1000).tolist() == PINNED_PAIR

    @pytest.mark.parametrize(
        "kind", [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64(), pa.bool_()]
    )
    def test_an_integer_has_one_hash_whatever_its_width(self, kind):
        one = pa.record_batch({"k": pa.array([0, 1], pa.int64()).cast(kind)})
        assert (
            partition_of(one, ["k"], 997).tolist() == partition_of(pa.record_batch({"k": [0, 1]}), ["k"], 997).tolist()
        )

    @pytest.mark.parametrize(
        "kind", [pa.large_string(), pa.binary(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
    )
    def test_a_text_has_one_hash_however_it_is_stored(self, kind):
        texts = pa.array(["", "x", "Grüße", None, "x"])
        stored = pa.record_batch({"k": texts.cast(kind)})
        assert (
            partition_of(stored, ["k"], 997).tolist()
            == partition_of(pa.record_batch({"k": texts}), ["k"], 997).tolist()
        )

    def test_a_slice_of_a_batch_hashes_as_the_whole_does(self):
        batch = pa.record_batch({"k": ["a", "bb", None, "", "ccc", "a"]})
        whole = partition_of(batch, ["k"], 64)
        assert partition_of(batch.slice(2, 3), ["k"], 64).tolist() == whole[2:5].tolist()

    @pytest.mark.parametrize(
        "column",
        [
            pa.array([1, None, 2], pa.int64()),
            pa.array(["a", None, "b"]),
            pa.array([1.0, None, 2.0]),
            pa.array([Decimal("1.10"), None, Decimal("2.00")]),
            pa.array([True, None, False]),
            pa.array([1, None, 2], pa.date32()),
            pa.array([1, None, 2], pa.date64()),
            pa.array([1, None, 2], pa.time64("us")),
            pa.array([b"12", None, b"34"], pa.binary(2)),
            pa.array([None, None, None]),
        ],
        ids=lambda column: str(column.type),
    )
    def test_null_keys_go_to_partition_0(self, column):
        found = partition_of(pa.record_batch({"k": column}), ["k"], 7)
        assert found[1] == 0
        assert ((found >= 0) & (found < 7)).all()

    def test_a_composite_key_with_one_null_is_still_a_key(self):
        n = 1000
        batch = pa.record_batch({"a": pa.nulls(n, pa.int64()), "b": list(range(n))})
        assert len(set(partition_of(batch, ["a", "b"], 4).tolist())) == 4

    def test_the_two_zeros_and_all_nans_are_one_key(self):
        other_nan = np.array([0x7FF8000000000001], dtype=np.uint64).view(np.float64)[0]
        batch = pa.record_batch({"k": pa.array([0.0, -0.0, np.nan, other_nan], from_pandas=False)})
        zero, minus_zero, nan, another = partition_of(batch, ["k"], 1 << 40).tolist()
        assert zero == minus_zero
        assert nan == another

    def test_keys_spread_evenly(self):
        ids = list(range(40_000))
        batch = pa.record_batch({"i": ids, "s": [f"user-{n}" for n in ids]})
        for key in (["i"], ["s"], ["i", "s"]):
            counts = np.bincount(partition_of(batch, key, 8), minlength=8)
            assert counts.min() > 4_700
            assert counts.max() < 5_300

    def test_a_key_column_that_is_not_there_is_named(self):
        with pytest.raises(ConfigError, match="PEN-1010 the key column 'idd'"):
            partition_of(pa.record_batch({"id": [1]}), ["idd"], 2)

    def test_rows_without_a_key_are_refused(self):
        with pytest.raises(ConfigError, match="PEN-1010 rows without a key"):
            partition_of(pa.record_batch({"id": [1]}), [], 2)

    def test_a_list_is_no_key(self):
        with pytest.raises(ConfigError, match=r"PEN-1010 .*list<"):
            partition_of(pa.record_batch({"k": [[1]]}), ["k"], 2)

    def test_the_key_is_the_routes_own_then_the_schemas_then_the_envelopes(self):
        plain = pa.schema([("id", pa.int64())])
        envelope = pa.schema([("key", pa.binary()), ("payload", pa.binary())])
        assert Route(key=("a",)).key_columns(with_key(plain, ["id"])) == ["a"]
        assert Route().key_columns(with_key(plain, ["id"])) == ["id"]
        assert Route().key_columns(envelope) == ["key"]
        assert Route().key_columns(plain) == []

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.tuples(st.one_of(st.none(), st.text(max_size=4)), st.one_of(st.none(), st.integers(-3, 3))), max_size=60
        ),
        st.integers(1, 9),
        st.sampled_from([["a"], ["b"], ["a", "b"]]),
    )
    def test_splitting_covers_every_row_once_and_keeps_the_order_of_each_key(self, keys, partitions, by):
        batch = pa.record_batch(
            {
                "a": pa.array([a for a, _ in keys], pa.string()),
                "b": pa.array([b for _, b in keys], pa.int64()),
                "n": pa.array(range(len(keys)), pa.int64()),
            }
        )
        parts = split_by(batch, partition_of(batch, by, partitions), partitions)
        assert len(parts) == partitions
        rows = [part.to_pylist() for part in parts if part is not None]
        assert sorted(row["n"] for part in rows for row in part) == list(range(len(keys)))
        homes: dict[tuple[object, ...], int] = {}
        for home, part in enumerate(rows):
            assert [row["n"] for row in part] == sorted(row["n"] for row in part)
            for row in part:
                assert homes.setdefault(tuple(row[name] for name in by), home) == home


PINNED = {
    "i": [55, 158, 767, 340],
    "s": [433, 599, 681, 927],
    "f": [55, 358, 732, 271],
    "t": [55, 158, 636, 952],
}
PINNED_PAIR = [535, 111, 88, 449]
