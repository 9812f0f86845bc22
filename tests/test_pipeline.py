from __future__ import annotations

import copy
import os
import pickle
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import PositiveInt, model_validator

from penstock.config import Config, FilePath, Secret
from penstock.errors import ConfigError, FatalError
from penstock.pipeline import Pipeline, PipelineError, Processing, compare_shapes
from penstock.pipeline.checks import stream_notices
from penstock.pipeline.routing import Route, Router
from penstock.pipeline.shape import changes_between
from penstock.runtime import supervisor
from penstock.schema.evolution import EvolutionConfig, Policy
from penstock.sink import DeliveryGuarantee, Receipt, SinkConnector, SinkConnectorCapabilities
from penstock.source import PollingSource, Position, RangeSource, SourceConnector, StreamingSource

HERE = __name__


class TablesConfig(Config):
    dsn: str = "postgresql://app@db/shop"
    """Address."""

    password: Secret | None = None
    """Password."""

    tables: list[str] = []  # noqa: RUF012 - pydantic copies it
    """Tables."""

    folder: Path = Path("in")
    """A directory."""

    batch_rows: PositiveInt = 10
    """Rows."""

    columns: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    """Columns."""

    @model_validator(mode="after")
    def _refuse(self) -> TablesConfig:
        if self.tables == ["wrong"]:
            raise ValueError("tables and columns disagree")
        if self.tables == ["worse"]:
            raise ConfigError("the dsn is not one", code="PEN-1016", hint="write another")
        return self


class Tables(RangeSource[TablesConfig, Position]):
    name = "tables"


class Other(RangeSource[TablesConfig, Position]):
    name = "other"


class Poll(PollingSource[Config]):
    name = "poll"


class Once(StreamingSource[Config]):
    name = "once"
    supports_replay = False


class Bare(SourceConnector[Config]):
    name = "bare"


class LakeConfig(Config):
    path: FilePath = "lake/{topic}"
    """Where."""

    key: list[str] = []  # noqa: RUF012 - pydantic copies it
    """Key."""

    mode: str = "append"
    """How."""


class FollowingConfig(LakeConfig, EvolutionConfig):
    pass


class Following(SinkConnector[FollowingConfig, Receipt]):
    name = "following"


class Lake(SinkConnector[LakeConfig, Receipt]):
    name = "lake"
    capabilities = SinkConnectorCapabilities().with_exactly_once()


class Keyed(SinkConnector[LakeConfig, Receipt]):
    name = "keyed"
    capabilities = SinkConnectorCapabilities().with_idempotent()


class Screen(SinkConnector[Config, Receipt]):
    name = "screen"


def clean(frame: Any) -> Any:
    return frame


not_a_function = 5

GOOD = f"""\
connector_name = "orders"

[source]
connector = "{HERE}:Tables"

[sink]
connector = "{HERE}:Lake"
"""


@pytest.fixture(autouse=True)
def _clean_surroundings(monkeypatch):
    monkeypatch.delenv("CONNECTOR_NAME", raising=False)
    monkeypatch.delenv("CONNECTOR_CONFIG_PATH", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "pipeline.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def refused(write):
    """The text of the error that a file gives."""

    def refused(text: str) -> str:
        with pytest.raises(ConfigError) as caught:
            Pipeline.from_toml(write(text))
        shown = "".join(traceback.format_exception(caught.value))
        assert "hunter2" not in shown
        assert "hunter2" not in repr(caught.value.__context__)
        return str(caught.value)

    return refused


def made(**changes: Any) -> Pipeline:
    sinks: dict[str, Any] = changes.pop("sinks", {"lake": Lake(LakeConfig())})
    routes: tuple[Route, ...] = changes.pop("routes", ())
    parts: dict[str, Any] = {
        "name": "orders",
        "sources": {"tables": Tables(TablesConfig())},
        "sinks": sinks,
        "router": Router(routes, tuple(sinks), changes.pop("unrouted", "stop")),
    }
    return Pipeline(**{**parts, **changes})


class TestReading:
    def test_a_short_file_is_a_pipeline(self, write):
        path = write(GOOD)
        pipeline = Pipeline.from_toml(path)
        assert pipeline.name == "orders"
        assert isinstance(pipeline.sources["tables"], Tables)
        assert isinstance(pipeline.sinks["lake"], Lake)
        assert pipeline.router == Router((), ("lake",))
        assert pipeline.delivery is DeliveryGuarantee.AT_LEAST_ONCE
        assert pipeline.processing.state_dir == path.parent / "state"
        assert pipeline.file == path

    def test_a_route_may_say_what_happens_to_a_schema_if_its_sinks_can_do_it(self, write, refused):
        text = GOOD + "[[routes]]\nschema_evolution = 'discard_row'\n"
        route = Pipeline.from_toml(write(text.replace(":Lake", ":Following"))).router.routes[0]
        assert route.schema_evolution is Policy.DISCARD_ROW
        assert "PEN-1010" in refused(text)
        assert "has no `schema_evolution`" in refused(text)
        assert "PEN-1003" in refused(text.replace("discard_row", "ignore"))
        two = "[[routes]]\nfrom = 'a'\nto = '/t'\n[[routes]]\nfrom = 'b'\nto = 't'\nschema_evolution = 'freeze'"
        assert "two routes lead to 't' in one sink and differ" in refused(GOOD.replace(":Lake", ":Following") + two)

    def test_a_long_file_is_a_pipeline(self, write, tmp_path):
        pipeline = Pipeline.from_toml(
            write(f"""
            connector_name = "orders-to-lake"
            delivery = "exactly-once"
            [processing]
            state_dir = "somewhere/state"
            unrouted = "skip"
            [[sources]]
            connector = "{HERE}:Tables"
            name = "one"
            password = {{ env = "PG_PASSWORD" }}
            folder = "data"
            [[sources]]
            connector = "{HERE}:Poll"
            [[routes]]
            from = "public.*"
            source = "one"
            match = {{ site = "north" }}
            to = "/lake/{{table}}"
            sinks = ["here"]
            partitions = 4
            key = ["id"]
            [[routes]]
            transform = "{HERE}:clean"
            per_epoch = true
            [[sinks]]
            connector = "{HERE}:Lake"
            name = "here"
            path = "lake/{{topic}}"
            [[sinks]]
            connector = "{HERE}:Lake"
            name = "there"
            path = "s3://bucket/{{topic}}"
            """)
        )
        assert list(pipeline.sources) == ["one", "poll"]
        assert pipeline.sources["one"].config.folder == tmp_path / "data"
        assert pipeline.sources["one"].config.password == Secret(env="PG_PASSWORD")
        assert pipeline.sinks["here"].config.path == f"{tmp_path}/lake/{{topic}}"
        assert pipeline.sinks["there"].config.path == "s3://bucket/{topic}"
        assert pipeline.processing.state_dir == tmp_path / "somewhere" / "state"
        first, second = pipeline.router.routes
        assert first == Route(
            "public.*", "/lake/{table}", "one", (("site", "north"),), ("here",), partitions=4, key=("id",)
        )
        assert second == Route(transform=f"{HERE}:clean", per_epoch=True)
        assert pipeline.router.unrouted == "skip"

    def test_default_paths_are_beside_the_file_too(self, write, tmp_path, monkeypatch):
        (tmp_path / "elsewhere").mkdir()
        path = write(GOOD)
        monkeypatch.chdir(tmp_path / "elsewhere")
        pipeline = Pipeline.from_toml(os.path.relpath(path))
        assert pipeline.sources["tables"].config.folder == tmp_path / "in"
        assert pipeline.sinks["lake"].config.path == f"{tmp_path}/lake/{{topic}}"

    def test_a_secret_file_is_beside_the_file(self, write, tmp_path):
        (tmp_path / "pw").write_text("hunter2\n")
        path = write(GOOD.replace("[sink]", 'password = { file = "pw" }\n[sink]'))
        secret = Pipeline.from_toml(path).sources["tables"].config.password
        assert secret.reveal() == "hunter2"
        assert "hunter2" not in repr(secret)

    def test_the_environment_names_the_file_and_the_pipeline(self, write, monkeypatch):
        monkeypatch.setenv("CONNECTOR_CONFIG_PATH", str(write(GOOD)))
        monkeypatch.setenv("CONNECTOR_NAME", "other-name")
        assert Pipeline.from_toml().name == "other-name"

    def test_no_file_at_all_is_an_error(self):
        with pytest.raises(ConfigError, match="PEN-1015 no pipeline file"):
            Pipeline.from_toml()

    def test_malformed_toml_is_told_with_its_line(self, refused):
        assert refused("a = 1\nb = \n").startswith("PEN-1001 pipeline.toml:2:5: ")

    def test_it_travels(self, write):
        pipeline = Pipeline.from_toml(write(GOOD))
        assert pickle.loads(pickle.dumps(pipeline)).shape() == pipeline.shape()


ERRORS = [
    # what is wrong, put into which line, the error
    ('colour = "red"', 2, "PEN-1002 {}unknown key 'colour' in the file\n  → the keys are connector_name, delivery,"),
    ("[procesing]", 3, "PEN-1002 {}unknown key 'procesing' in the file; did you mean 'processing'?"),
    (
        "[processing]\npol_interval_ms = 1",
        4,
        "PEN-1002 {}unknown key 'pol_interval_ms' in [processing]; did you mean 'poll_interval_ms'?",
    ),
    (
        "[processing]\nlinger_ms = '5'",
        4,
        "PEN-1003 {}'linger_ms' in [processing] must be a whole number from 0, not \"5\"",
    ),
    (
        "[processing]\nlinger_ms = true",
        4,
        "PEN-1003 {}'linger_ms' in [processing] must be a whole number from 0, not true",
    ),
    (
        "[processing]\nmetrics_port = 70000",
        4,
        "PEN-1003 {}'metrics_port' in [processing] must be a whole number from 0 up to 65535, not 70000",
    ),
    (
        "[processing]\nunrouted = 'drop'",
        4,
        'PEN-1003 {}\'unrouted\' in [processing] must be "stop" or "skip", not "drop"',
    ),
    (
        "[processing]\non_error = 'drop'",
        4,
        'PEN-1003 {}\'on_error\' in [processing] must be "stop" or "skip" or "dead_letter", not "drop"',
    ),
    ("processing = 5", 2, "PEN-1003 {}[processing] must be a table"),
    (
        "delivery = 'at-most-once'",
        2,
        'PEN-1003 {}\'delivery\' must be "at-least-once" or "exactly-once", not "at-most-once"',
    ),
    ("routes = 5", 2, "PEN-1003 {}'routes' must be a list of tables\n  → write [[routes]]"),
    ("[[routes]]\nform = 'a'", 4, "PEN-1002 {}unknown key 'form' in [[routes]]; did you mean 'from'?"),
    (
        "[[routes]]\nfrom = 'a'\n[[routes]]\nfrom = 'a+'",
        6,
        "PEN-1010 {}`from` = 'a+': `+` and `#` are whole levels",
    ),
    ("[[routes]]\nto = '/{tabel}'", 4, "PEN-1010 {}`to` = '/{{tabel}}': there is no {{tabel}}"),
    ("[[routes]]\nmatch = { site = 'a#' }", 4, "PEN-1010 {}`match.site` = 'a#'"),
    ("[[routes]]\nsinks = ['lak']", 4, "PEN-1010 {}no sink is named 'lak'; did you mean 'lake'?"),
    ("[[routes]]\nsinks = []", 4, "PEN-1003 {}'sinks' in [[routes]] must be a list of text, not a list"),
    ("[[routes]]\nsinks = ['lake', 'lake']", 4, "PEN-1010 {}the route names a sink twice"),
    ("[[routes]]\nsource = 'tabels'", 4, "PEN-1010 {}no source is named 'tabels'; did you mean 'tables'?"),
    (
        f"[[routes]]\nsql = 'select 1'\ntransform = '{HERE}:clean'",
        5,
        "PEN-1010 {}the route has both 'sql' and 'transform'",
    ),
    ("[[routes]]\nper_epoch = true", 4, "PEN-1010 {}'per_epoch' needs 'sql' or 'transform'"),
    ("[[routes]]\nsql = 'select 1'\npartitions = 2", 5, "PEN-1010 {}'partitions' cannot be kept through 'sql'"),
    ("[[routes]]\npartitions = 0", 4, "PEN-1003 {}'partitions' in [[routes]] must be a whole number above 0, not 0"),
    (
        "[[routes]]\ntransform = 'no_such_module:f'",
        4,
        "PEN-1010 {}cannot import 'no_such_module:f': there is no such module",
    ),
    (f"[[routes]]\ntransform = '{HERE}:claen'", 4, "PEN-1010 {}module test_pipeline"),
    (
        f"[[routes]]\ntransform = '{HERE}:not_a_function'",
        4,
        "PEN-1010 {}transform 'test_pipeline:not_a_function' is not a function",
    ),
    (
        "[[routes]]\nfrom = 'a'\nto = '/t'\n[[routes]]\nfrom = 'b'\nto = 't'\nsql = 'select 1'",
        6,
        "PEN-1010 {}two routes lead to 't' in one sink and differ",
    ),
    (
        "[[schemas]]\ntopic = '/a'\nschema_type = 'json'\nmetadata = ['colour']",
        6,
        "PEN-1003 {}'metadata.0' in [[schemas]]",
    ),
]


class TestErrors:
    @pytest.mark.parametrize(("wrong", "line", "error"), ERRORS, ids=[wrong for wrong, *_ in ERRORS])
    def test_each_mistake_is_told_with_its_line(self, refused, wrong, line, error):
        first, rest = GOOD.split("\n", 1)
        blank = "\n" if wrong.startswith("[") else ""
        assert refused(f"{first}\n{blank}{wrong}\n{rest}").startswith(error.format(f"pipeline.toml:{line}: "))

    @pytest.mark.parametrize(
        ("options", "line", "error"),
        [
            ("tabels = []", 5, "PEN-1002 {}unknown key 'tabels' in [source]; did you mean 'tables'?"),
            ("conector = 'x'", 5, "PEN-1002 {}unknown key 'conector' in [source]; did you mean 'connector'?"),
            ("batch_rows = 0", 5, "PEN-1003 {}'batch_rows' in [source] must be a whole number above 0, not 0"),
            ("folder = 5", 5, "PEN-1003 {}'folder' in [source] must be a path, not 5"),
            ("tables = ['a',\n\n 5]", 7, "PEN-1003 {}'tables.1' in [source]: should be a valid string"),
            ("columns = { a = 'x', b = 1 }", 5, "PEN-1003 {}'columns.b' in [source]: should be a valid string"),
            ("tables = ['wrong']", 3, "PEN-1016 {}[source]: tables and columns disagree"),
            ("tables = ['worse']", 3, "PEN-1016 {}the dsn is not one\n  → write another"),
            ("password = 'hunter2'", 5, "PEN-1003 {}'password' in [source]: a secret is a reference"),
            ("password = ['hunter2']", 5, "PEN-1003 {}'password' in [source]: a secret is a reference"),
            ("password = { text = 'hunter2' }", 5, "PEN-1002 {}unknown key 'text' in 'password' of [source]"),
            (
                "password = { evn = 'X' }",
                5,
                "PEN-1002 {}unknown key 'evn' in 'password' of [source]; did you mean 'env'?",
            ),
            ("password = {}", 5, "PEN-1003 {}'password' in [source]: a secret is either"),
            ("pasword = 'hunter2'", 5, "PEN-1002 {}unknown key 'pasword' in [source]; did you mean 'password'?"),
            ("dsn = ['postgresql://u:hunter2@h/d']", 5, "PEN-1003 {}'dsn' in [source] must be a text, not a list"),
            ("name = 'a b'", 5, "PEN-1003 {}'name' in [source] cannot be \"a b\""),
            ("name = 5", 5, "PEN-1003 {}'name' in [source] cannot be 5"),
        ],
    )
    def test_each_wrong_option_is_told_with_its_line(self, refused, options, line, error):
        text = GOOD.replace('Tables"\n', f'Tables"\n{options}\n')
        assert refused(text).startswith(error.format(f"pipeline.toml:{line}: "))

    @pytest.mark.parametrize(
        ("old", "new", "error"),
        [
            ('connector_name = "orders"', "", "PEN-1004 pipeline.toml:1: the file needs 'connector_name'"),
            (
                'connector_name = "orders"',
                "connector_name = '../x'",
                "PEN-1003 pipeline.toml:1: 'connector_name' cannot be \"../x\"",
            ),
            (f'[sink]\nconnector = "{HERE}:Lake"', "", "PEN-1004 pipeline.toml:1: the file needs a sink"),
            (f'connector = "{HERE}:Lake"', "", "PEN-1004 pipeline.toml:6: [sink] needs 'connector'"),
            (
                f'connector = "{HERE}:Lake"',
                "connector = 5",
                "PEN-1003 pipeline.toml:6: [sink] needs text in 'connector'",
            ),
            (
                f"{HERE}:Lake",
                "detla",
                "PEN-1006 pipeline.toml:7: unknown sink connector 'detla'; did you mean 'delta'?",
            ),
            (
                f"{HERE}:Lake",
                f"{HERE}:Tables",
                "PEN-1006 pipeline.toml:7: 'test_pipeline:Tables' is a source, not a sink",
            ),
            (f"{HERE}:Lake", "no_such:Thing", "PEN-1006 pipeline.toml:7: cannot import 'no_such:Thing'"),
            ("[source]", "[sources]", "PEN-1003 pipeline.toml:3: 'sources' must be a list of tables"),
            ("[sink]", "[[sink]]", "PEN-1003 pipeline.toml:6: 'sink' must be a table"),
        ],
    )
    def test_each_missing_part_is_told(self, refused, old, new, error):
        assert refused(GOOD.replace(old, new)).startswith(error)

    def test_all_mistakes_of_a_file_come_at_once_in_the_order_of_its_lines(self, write):
        text = (
            GOOD.replace("orders", "or ders")
            + "colour = 1\n[[routes]]\nsinks = ['lak']\npartitions = 'x'\n[[routes]]\nsinks = ['lak']\n"
            + "[processing]\nlog_level = 'loud'\n"
        )
        with pytest.raises(PipelineError) as caught:
            Pipeline.from_toml(write(text))
        lines = [line for line in str(caught.value).split("\n") if line.startswith("  pipeline.toml:")]
        assert [line.split(":")[1] for line in lines] == ["1", "8", "11", "13", "15"]
        assert [problem.code for problem in caught.value.problems] == [
            "PEN-1003", "PEN-1002", "PEN-1003", "PEN-1010", "PEN-1003",
        ]  # fmt: skip
        assert str(caught.value).startswith("PEN-1000 5 errors in pipeline.toml\n")

    def test_mistakes_beside_a_connector_that_cannot_be_found_are_told_too(self, refused):
        message = refused(GOOD.replace(f"{HERE}:Lake", "detla").replace("orders", "or ders"))
        assert "PEN-1006" in message
        assert "PEN-1003" in message

    def test_two_sources_of_one_name_are_refused(self, refused):
        twice = f'[[sources]]\nconnector = "{HERE}:Tables"\n' * 2
        message = refused(GOOD.replace(f'[source]\nconnector = "{HERE}:Tables"\n', twice))
        assert message.startswith("PEN-1003 pipeline.toml:5: two sources are named 'tables'")

    def test_the_short_and_the_long_form_together_are_refused(self, refused):
        assert "the file has both [source] and [[sources]]" in refused(
            GOOD + f'[[sources]]\nconnector = "{HERE}:Poll"\n'
        )

    def test_a_wrong_name_in_the_environment_is_told(self, refused, monkeypatch):
        monkeypatch.setenv("CONNECTOR_NAME", "a/b")
        assert "CONNECTOR_NAME cannot be" in refused(GOOD)

    def test_an_error_travels_with_its_code(self):
        error = pickle.loads(pickle.dumps(PipelineError("x", code="PEN-1003", hint="y")))
        assert (error.code, error.message, error.hint) == ("PEN-1003", "x", "y")


class TestDelivery:
    EXACTLY = DeliveryGuarantee.EXACTLY_ONCE

    def test_ranges_and_journaled_sources_into_an_exactly_once_sink_are_fine(self):
        pipeline = made(
            sources={"a": Tables(TablesConfig()), "b": Poll(Config()), "c": Once(Config())}, delivery=self.EXACTLY
        )
        pipeline.validate()
        assert pipeline.notices == []

    @pytest.mark.parametrize(
        ("changes", "what", "hint"),
        [
            ({"processing": Processing(checkpoint=False)}, "needs manifests", "checkpoint = false"),
            ({"sources": {"b": Bare(Config())}}, r"source 'b' \(bare\) cannot be read again", "another source"),
            ({"sinks": {"s": Screen(Config())}}, r"sink 's' \(screen\) may write a row twice", "another sink"),
            ({"sinks": {"k": Keyed(LakeConfig())}}, r"sink 'k' \(keyed\) may write a row twice", "set `key`"),
            (
                {"sources": {"o": Once(Config())}, "routes": (Route(reliable_dispatch=False),)},
                "reliable_dispatch = false would lose rows of source 'o'",
                "remove reliable_dispatch = false",
            ),
        ],
    )
    def test_what_cannot_be_exactly_once_is_refused_and_says_what_to_change(self, changes, what, hint):
        with pytest.raises(ConfigError, match=f"PEN-1008 .*{what}") as caught:
            made(**changes, delivery=self.EXACTLY).validate()
        assert hint in caught.value.hint
        assert 'delivery = "at-least-once"' in caught.value.hint
        made(**changes).validate()

    @pytest.mark.parametrize(
        "changes",
        [
            {"sinks": {"k": Keyed(LakeConfig(key=["id"]))}},
            {"sinks": {"k": Keyed(LakeConfig())}, "routes": (Route(key=("id",)),)},
            {"sources": {"p": Poll(Config())}, "routes": (Route(reliable_dispatch=False),)},
            {
                "sources": {"o": Once(Config()), "p": Poll(Config())},
                "routes": (Route(reliable_dispatch=False, source="p"), Route(source="o", to="/o")),
            },
        ],
    )
    def test_what_can_be_exactly_once_is_taken(self, changes):
        made(**changes, delivery=self.EXACTLY).validate()

    def test_a_refusal_has_the_line_of_the_sink(self, refused):
        text = 'delivery = "exactly-once"\n' + GOOD.replace(f"{HERE}:Lake", f"{HERE}:Screen")
        assert refused(text).startswith("PEN-1008 pipeline.toml:7: sink 'screen' (screen) may write a row twice")

    def test_only_a_source_that_lists_its_streams_is_missed_without_any(self):
        pipeline = made(sources={"t": Tables(TablesConfig()), "p": Poll(Config()), "s": Once(Config())})
        (notice,) = stream_notices(pipeline, {"t": [], "p": [], "s": []})
        assert notice == "source 't' has no streams now, so no rows will come until it has one"

    def test_what_is_not_promised_is_said(self):
        pipeline = made(
            sources={"o": Once(Config()), "t": Tables(TablesConfig())},
            sinks={"s": Screen(Config()), "idle": Lake(LakeConfig())},
            routes=(Route("a", reliable_dispatch=False, sinks=("s",)),),
            processing=Processing(checkpoint=False),
        )
        assert pipeline.notices == [
            "checkpoint = false: a restart begins from the start and writes again what was written before",
            "sink 's' (screen) may repeat rows after a crash",
            "sink 'idle' gets no rows: no route names it",
            "source 'o' is at-most-once for 'a': what a crash finds in memory is lost",
            "reliable_dispatch = false changes nothing for source 't', which has no journal",
        ]


class TestObjects:
    def test_a_pipeline_of_objects_is_checked_like_a_file(self):
        with pytest.raises(PipelineError) as caught:
            made(name="a b", sources={}, routes=(Route(sinks=("lak",), to="/{x}"),)).validate()
        assert [problem.code for problem in caught.value.problems] == ["PEN-1003", "PEN-1004", "PEN-1010", "PEN-1010"]

    @pytest.fixture
    def ran(self, monkeypatch):
        """What the supervisor was asked to run."""
        ran: list[tuple[Any, ...]] = []
        monkeypatch.setattr(
            supervisor, "run", lambda pipeline, engine, drain, serve: ran.append((pipeline, engine.session, drain))
        )
        return ran

    def test_running_checks_first(self, ran):
        with pytest.raises(ConfigError, match="PEN-1004"):
            made(sources={}).run()
        assert ran == []

    def test_running_hands_over_to_the_supervisor(self, ran):
        pipeline = made()
        pipeline.run(spark="session", drain=True)
        assert ran == [(pipeline, "session", True)]

    def test_what_executors_need_is_listed(self):
        assert made(routes=(Route(transform=f"{HERE}:clean"),)).third_party == [Path(__file__)]


class TestStreams:
    def problems(self, pipeline: Pipeline, **streams: list[str]) -> list[tuple[str, str]]:
        return [(problem.code, problem.what) for problem in pipeline.check_streams(streams)]

    def test_streams_with_topics_of_their_own_are_fine(self):
        pipeline = made(routes=(Route("public.*", "/lake/{table}"), Route("#", "/log/{stream}")))
        assert self.problems(pipeline, tables=["public.a", "public.b"]) == []

    def test_two_streams_meet_in_a_topic_without_a_placeholder(self):
        pipeline = made(routes=(Route("public.*", "/lake/all"),), sinks={"s": Screen(Config())})
        (problem,) = pipeline.check_streams({"tables": ["public.a", "public.b"]})
        assert problem.code == "PEN-1011"
        assert problem.what == "the streams tables/public.a and tables/public.b meet in topic /lake/all of sink 's'"
        assert "{table}" in problem.hint

    def test_equal_tables_of_two_schemas_meet(self):
        pipeline = made(routes=(Route("*.*", "/lake/{table}"),))
        assert self.problems(pipeline, tables=["a.orders", "b.orders"]) == [
            ("PEN-1011", "the streams tables/a.orders and tables/b.orders meet in lake/lake/orders")
        ]

    def test_equal_streams_of_two_sources_meet(self):
        pipeline = made(sources={"a": Tables(TablesConfig()), "b": Tables(TablesConfig())})
        assert self.problems(pipeline, a=["rows"], b=["rows"]) == [
            ("PEN-1011", "the streams a/rows and b/rows meet in lake/rows")
        ]
        apart = replace(pipeline, router=Router((Route(to="/{source}/{stream}"),), ("lake",)))
        assert self.problems(apart, a=["rows"], b=["rows"]) == []

    def test_topics_meet_in_a_path_without_the_topic(self):
        pipeline = made(sinks={"lake": Lake(LakeConfig(path="lake"))})
        assert self.problems(pipeline, tables=["a"]) == []
        (problem,) = pipeline.check_streams({"tables": ["a", "b"]})
        assert problem.code == "PEN-1011"
        assert "{topic} into the path of sink 'lake'" in problem.hint

    def test_two_sinks_with_one_path_meet_unless_their_topics_differ(self):
        sinks = {"x": Lake(LakeConfig()), "y": Lake(LakeConfig(mode="upsert"))}
        assert self.problems(made(sinks=sinks), tables=["a"]) == [
            ("PEN-1011", "the stream tables/a reaches lake/a twice")
        ]
        apart = made(sinks=sinks, routes=(Route("a", sinks=("x",)), Route("b", sinks=("y",))))
        assert self.problems(apart, tables=["a", "b"]) == []

    def test_one_stream_into_two_sinks_does_not_meet_itself(self):
        sinks = {"x": Lake(LakeConfig(path="x/{topic}")), "y": Lake(LakeConfig(path="y/{topic}"))}
        assert self.problems(made(sinks=sinks, routes=(Route(), Route("a"))), tables=["a"]) == []

    def test_a_stream_without_a_route_is_a_problem_unless_skipped(self):
        routes = (Route("other", "/t"),)
        assert [code for code, _ in self.problems(made(routes=routes), tables=["a"])] == ["PEN-1018"]
        assert self.problems(made(routes=routes, unrouted="skip"), tables=["a"]) == []

    def test_requiring_refuses_what_checking_finds(self):
        with pytest.raises(ConfigError, match="PEN-1018"):
            made(routes=(Route("other", "/t"),)).require_streams({"tables": ["a"]})


class TestChanges:
    """Each row of docs/spec/changes.md."""

    BEFORE = {  # noqa: RUF012 - read only
        "sources": {"s": Tables(TablesConfig(tables=["a", "b"], columns={"id": "int64"}))},
        "sinks": {"x": Lake(LakeConfig()), "y": Lake(LakeConfig(path="y"))},
        "routes": (Route("a", "/a", sinks=("x",)), Route("b", "/b")),
    }

    def shapes(self, **changes: Any) -> tuple[Any, Any]:
        return made(**self.BEFORE).shape(), made(**{**self.BEFORE, **changes}).shape()

    def source(self, **options: Any) -> dict[str, Any]:
        return {"s": Tables(TablesConfig(**{"tables": ["a", "b"], "columns": {"id": "int64"}, **options}))}

    def test_the_same_file_is_no_change(self):
        assert compare_shapes(*self.shapes()) == []

    @pytest.mark.parametrize(
        ("changes", "notice"),
        [
            (
                {"sources": {**BEFORE["sources"], "new": Poll(Config())}},
                "the source 'new' is new and is read from its beginning",
            ),
            (
                {"sinks": {**BEFORE["sinks"], "new": Lake(LakeConfig(path="n"))}},
                "the sink 'new' is new and gets rows from now on",
            ),
            (
                {"routes": (*BEFORE["routes"], Route("c", "/c"))},
                "the route from 'c' to '/c' is new and gets rows from now on",
            ),
            (
                {"routes": (*BEFORE["routes"], Route("a", "/a2"))},
                "the route from 'a' to '/a2' is new and gets rows from now on",
            ),
            ({"routes": (Route("a", "/a", sinks=("x", "y")), Route("b", "/b"))}, None),
            ({"routes": (Route("b", "/b"), Route("a", "a", sinks=("x",)))}, None),
            (
                {"routes": (Route("a", "/a", sinks=("x",), sql="select 1"), Route("b", "/b"))},
                "the route from 'a' to '/a' works differently from now on",
            ),
            ({"routes": (Route("a", "/a", sinks=("x",), partitions=4), Route("b", "/b"))}, None),
            (
                {"routes": (Route("a", "/a", sinks=("x",), exclude=("a1",)), Route("b", "/b"))},
                "the route from 'a' to '/a' leaves 'a1' out from now on; earlier rows stay in the targets",
            ),
            (
                {"delivery": DeliveryGuarantee.EXACTLY_ONCE},
                "delivery is exactly-once from now on; earlier rows were written at-least-once",
            ),
            ({"processing": Processing(max_retries=99, unrouted="skip")}, None),
        ],
    )
    def test_a_change_that_is_fine(self, changes, notice):
        assert compare_shapes(*self.shapes(**changes)) == ([notice] if notice else [])

    def test_a_table_or_a_column_added_is_fine(self):
        sources = self.source(tables=["b", "a", "c"], columns={"id": "int64", "note": "string"})
        assert compare_shapes(*self.shapes(sources=sources)) == [
            "`tables` of source 's' has 'c' from now on",
            "`columns` of source 's' has 'note' from now on",
        ]

    def test_connection_details_and_tuning_may_change(self):
        sources = self.source(dsn="postgresql://u:hunter2@other/db", password=Secret(env="OTHER"), batch_rows=99)
        old, new = self.shapes(sources=sources)
        assert compare_shapes(old, new) == []
        assert "hunter2" not in str(new)

    @pytest.mark.parametrize(
        ("changes", "refusal"),
        [
            ({"name": "renamed"}, "the pipeline 'orders' was renamed 'renamed'"),
            ({"sources": {"t": BEFORE["sources"]["s"]}}, "the source 's' was removed or renamed"),
            (
                {"sources": {"s": Other(TablesConfig())}},
                "the source 's' changed its connector from 'test_pipeline:Tables' to 'test_pipeline:Other'",
            ),
            (
                {"sources": {"s": Tables(TablesConfig(tables=["a"], columns={"id": "int64"}))}},
                "`tables` of source 's' lost or changed 'b'",
            ),
            (
                {"sources": {"s": Tables(TablesConfig(tables=["a", "b"], columns={"id": "int32"}))}},
                "`columns` of source 's' lost or changed 'id'",
            ),
            ({"sinks": {"x": Lake(LakeConfig())}}, "the sink 'y' was removed or renamed"),
            (
                {"sinks": {"x": Keyed(LakeConfig()), "y": Lake(LakeConfig(path="y"))}},
                "the sink 'x' changed its connector",
            ),
            (
                {"sinks": {"x": Lake(LakeConfig(path="z")), "y": Lake(LakeConfig(path="y"))}},
                "`path` of sink 'x' changed from 'lake/{topic}' to 'z'",
            ),
            (
                {"sinks": {"x": Lake(LakeConfig(mode="upsert")), "y": Lake(LakeConfig(path="y"))}},
                "`mode` of sink 'x' changed",
            ),
            ({"routes": (Route("a", "/a", sinks=("x",)),)}, "the route from 'b' to '/b' was removed or changed"),
            (
                {"routes": (Route("a", "/a", sinks=("x",)), Route("b*", "/b"))},
                "the route from 'b' to '/b' was removed or changed",
            ),
            (
                {"routes": (Route("a", "/z", sinks=("x",)), Route("b", "/b"))},
                "the route from 'a' now leads to '/z', not '/a'",
            ),
            (
                {"routes": (Route("a", "/a", sinks=("x",)), Route("b", "/b", sinks=("x",)))},
                "the route from 'b' to '/b' no longer names the sink 'y'",
            ),
            (
                {"routes": (Route("a", "/a", sinks=("x",), match=(("k", "v"),)), Route("b", "/b"))},
                "the route from 'a' to '/a' was removed or changed",
            ),
        ],
    )
    def test_a_change_that_needs_a_reset_is_refused(self, changes, refusal):
        old, new = self.shapes(**changes)
        with pytest.raises(ConfigError, match="PEN-1013") as caught:
            compare_shapes(old, new)
        assert refusal in str(caught.value)
        assert "undo" in caught.value.hint

    def test_the_first_route_takes_the_place_of_the_default_one(self):
        without = made().shape()
        with pytest.raises(ConfigError, match=r"PEN-1013 .*route from '#' to '/\{stream\}' was removed"):
            compare_shapes(without, made(routes=(Route("a", "/a"),)).shape())
        assert len(compare_shapes(without, made(routes=(Route("#", "/{stream}"), Route("a", "/a"))).shape())) == 1

    def test_all_refusals_come_at_once(self):
        old, new = self.shapes(sources={"t": Poll(Config())}, sinks={"x": Lake(LakeConfig())})
        assert len([finding for finding in changes_between(old, new) if not finding.ok]) == 2
        with pytest.raises(ConfigError, match=r"'s' was removed or renamed; the sink 'y' was removed"):
            compare_shapes(old, new)

    def test_a_directory_may_move_with_everything_in_it(self, tmp_path):
        shapes = []
        for place in ("here", "there"):
            (tmp_path / place).mkdir()
            (tmp_path / place / "pipeline.toml").write_text(GOOD)
            shapes.append(Pipeline.from_toml(tmp_path / place / "pipeline.toml").shape())
        assert shapes[0] == shapes[1]

    def test_a_shape_of_a_newer_version_is_refused(self):
        old, new = self.shapes()
        newer = {**copy.deepcopy(old), "version": 99}
        with pytest.raises(FatalError, match="PEN-5006"):
            compare_shapes(newer, new)
