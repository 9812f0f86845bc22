"""Files of Danube Connect: rewritten by `penstock init --from-danube`, and the keys that they share with ours."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.cli.from_danube import convert
from penstock.errors import ConfigError
from penstock.pipeline import Pipeline
from penstock.testing.danube import DanubeBroker
from penstock.testing.mosquitto import Mosquitto, is_installed

pytestmark = pytest.mark.xdist_group("danube")

PAGE = (Path(__file__).parents[2] / "docs" / "from-danube-connect.md").read_text()
THEIRS, OURS = (re.findall(rf"```{mark}\n(.*?)```", PAGE, re.DOTALL)[0] for mark in (" toml", "toml"))
SCHEMA = '{"type": "object", "properties": {"bed": {"type": "string"}}}'

WEBHOOK = """
danube_service_url = "http://localhost:6650"
connector_name = "hooks"
[server]
port = 8081
timeout_seconds = 20
[auth]
type = "apikey"
secret_env = "HOOK_KEY"
header = "x-api-key"
[rate_limit]
requests_per_second = 100
burst_size = 200
per_ip_enabled = true
per_ip_requests_per_second = 10
[[routes]]
from = "/hooks/orders"
to = "/shop/orders"
partitions = 2
reliable_dispatch = true
[[routes]]
from = "/hooks/notes"
to = "/shop/notes"
[[schemas]]
topic = "/shop/notes"
subject = "notes-v1"
schema_type = "string"
schema_file = ""
"""

DELTA = """
danube_service_url = "http://localhost:6650"
connector_name = "to-lake"
[deltalake]
storage_backend = "s3"
s3_region = "eu-central-1"
[[deltalake.routes]]
from = "/shop/orders"
subscription = "lake"
subscription_type = "FailOver"
to = "s3://bucket/orders"
write_mode = "overwrite"
include_danube_metadata = true
expected_schema_subject = "orders-v1"
field_mappings = [
    { json_path = "id", column = "order_id", data_type = "Int64", nullable = false },
    { json_path = "customer.name", column = "name", data_type = "Utf8" },
]
[[deltalake.routes]]
from = "/shop/refunds"
subscription = "lake"
subscription_type = "FailOver"
to = "s3://bucket/refunds"
expected_schema_subject = "orders-v1"
field_mappings = [{ json_path = "id", column = "id", data_type = "Int64" }]
"""

QDRANT = """
danube_service_url = "http://localhost:6650"
connector_name = "vectors"
[qdrant]
url = "http://localhost:6334"
[[qdrant.routes]]
from = "/default/vectors"
subscription = "qdrant"
subscription_type = "Shared"
to = "vectors"
vector_dimension = 384
"""


def written(directory: Path, text: str) -> tuple[Path, list[str]]:
    """The new file beside the old one, and the notes."""
    origin, made = directory / "connector.toml", directory / "pipeline.toml"
    origin.write_text(text)
    (directory / "climate.json").write_text(SCHEMA)
    moved = convert(origin)
    made.write_text(moved.text(origin.name))
    return made, moved.notes


def run(*words: Any) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return int(end.value.code or 0)


def test_the_two_files_of_the_page_belong_together(tmp_path: Path) -> None:
    made, notes = written(tmp_path, THEIRS)
    assert made.read_text() == OURS
    assert len(notes) == 4


def test_the_pages_file_is_written_and_passes_check(
    tmp_path: Path, need: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need(is_installed(), "mosquitto is not installed: `make servers` installs it")
    (tmp_path / "climate.json").write_text(SCHEMA)
    with DanubeBroker() as danube, Mosquitto() as mosquitto:
        text = THEIRS.replace('"mosquitto"', '"127.0.0.1"').replace("1883", str(mosquitto.port)).replace("9090", "0")
        (tmp_path / "connector.toml").write_text(text)
        made = tmp_path / "pipeline.toml"
        assert run("init", made, "--from-danube", tmp_path / "connector.toml") == 0
        said = capsys.readouterr().out
        assert "not carried over" in said
        assert "MQTT_PASSWORD" in said
        assert '"green"' not in made.read_text(), "a password was written down"
        monkeypatch.setenv("MQTT_PASSWORD", "green")
        monkeypatch.setenv("DANUBE_SERVICE_URL", danube.url)
        assert run("check", made) == 0, capsys.readouterr()
        assert run("init", made, "--from-danube", tmp_path / "connector.toml") == 2, "a file that is there stays"


def test_a_webhook_becomes_a_source_routes_and_a_sink_for_each_way_to_make_topics(tmp_path: Path) -> None:
    made, notes = written(tmp_path, WEBHOOK)
    found = Pipeline.from_toml(made)
    source, sinks = found.sources["webhook"].config, [sink.config for sink in found.sinks.values()]
    assert (source.port, source.host, source.request_timeout_secs) == (8081, "0.0.0.0", 20)
    assert (source.auth.type, source.auth.keys[0].env, source.auth.header) == ("api_key", "HOOK_KEY", "x-api-key")
    assert (source.rate_limit_per_sec, source.client_rate_limit_per_sec) == (100, 10)
    assert [(each.path, each.stream) for each in source.endpoints] == [
        ("/hooks/orders", "hooks/orders"),
        ("/hooks/notes", "hooks/notes"),
    ]
    made_as = [(sink.partitions, sink.reliable_dispatch, sink.schema_subject, sink.schema_type) for sink in sinks]
    assert made_as == [(2, True, None, None), (0, False, "notes-v1", "string")]
    assert any("burst_size" in note for note in notes)


def test_a_delta_sink_becomes_sources_by_subscription_sql_and_a_table_each(tmp_path: Path) -> None:
    made, notes = written(tmp_path, DELTA)
    found = Pipeline.from_toml(made)
    (source,) = (each.config for each in found.sources.values())
    assert (source.subscription, source.subscription_type) == ("lake", "failover")
    assert (source.topics, source.expected_schema_subject) == (["/shop/orders", "/shop/refunds"], "orders-v1")
    assert [sink.config.path for sink in found.sinks.values()] == ["s3://bucket/orders", "s3://bucket/refunds"]
    first, second = (each["sql"] for each in tomllib.loads(made.read_text())["routes"])
    assert "from_json(`value`, '`id` STRING, `customer` STRUCT<`name`: STRING>, `_not_json` STRING', map(" in first
    assert "assert_true(`json`.`_not_json` IS NULL" in first
    assert "coalesce(CAST(`json`.`id` AS BIGINT), raise_error('id is null')) AS `order_id`" in first
    assert "`json`.`customer`.`name` AS `name`" in first
    assert "AS `_danube_metadata`" in first
    assert "_danube_metadata" not in second
    for word in ("write_mode", "nullable", "_danube_metadata"):
        assert any(word in note for note in notes), word


def test_a_connector_that_is_not_here_keeps_what_is_danubes_and_names_the_rest(tmp_path: Path) -> None:
    made, notes = written(tmp_path, QDRANT)
    found = Pipeline.from_toml(made)
    assert found.sources["qdrant"].config.subscription_type == "shared"
    assert list(found.sinks) == ["screen"]
    said = " ".join(notes)
    assert all(word in said for word in ("to, vector_dimension", "qdrant.url", "no connector for qdrant"))


@pytest.mark.parametrize("text", [THEIRS, WEBHOOK, DELTA, QDRANT], ids=["mqtt", "webhook", "deltalake", "qdrant"])
def test_no_key_is_dropped_without_a_word(tmp_path: Path, text: str) -> None:
    """A key that nobody knows, put into every table, is named each time."""
    count = 0

    def strange(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return f"{match[0]}\nstrange_{count} = 1"

    with_strange = re.sub(r"^\[(?!\[schemas).*\]$", strange, text, flags=re.MULTILINE)
    _, notes = written(tmp_path, f"strange_0 = 1\n{with_strange}")
    assert count >= 2
    said = re.findall(r"strange_\d+", " ".join(notes))
    assert sorted(said) == sorted(f"strange_{number}" for number in range(count + 1))


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ('[mqtt]\n[[mqtt.routes]]\nto = "/a/b"\n', "no 'from'"),
        ('[mqtt]\n[[mqtt.routes]]\nfrom = "a"\n', "no 'to'"),
        ('[mqtt]\n[[schemas]]\ntopic = "/a/b"\n', "no 'schema_type'"),
        ("[mqtt]\nroutes = 3\n", "another kind of value"),
        ('mqtt = "x"\n', "another kind of value"),
    ],
)
def test_a_file_that_is_not_whole_is_refused_with_what_it_lacks(tmp_path: Path, rest: str, said: str) -> None:
    file = tmp_path / "connector.toml"
    file.write_text(f'connector_name = "x"\n{rest}')
    with pytest.raises(ConfigError, match=said):
        convert(file)


def test_the_version_of_a_plain_schema_goes_to_the_sink_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "connector.toml"
    routes = "".join(f'[[mqtt.routes]]\nfrom = "{name}"\nto = "/a/{name}"\n' for name in "bc")
    schema = '[[schemas]]\ntopic = "/a/b"\nsubject = "s"\nschema_type = "string"\nversion_strategy = { pinned = 2 }\n'
    schema += "auto_register = false\n"
    file.write_text(f'connector_name = "x"\n[mqtt]\n{routes}{schema}')
    named, other = tomllib.loads(convert(file).text("connector.toml"))["sinks"]
    assert (named["schema_subject"], named["version_strategy"]) == ("s", {"pinned": 2})
    assert "schema_type" not in named, "theirs registers nothing either"
    assert "version_strategy" not in other


def test_a_file_that_is_none_of_theirs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "connector.toml").write_text('[source]\nconnector = "files"\n')
    with pytest.raises(ConfigError, match="no file of Danube Connect"):
        convert(tmp_path / "connector.toml")
    (tmp_path / "connector.toml").write_text("a = [")
    with pytest.raises(ConfigError, match="no TOML"):
        convert(tmp_path / "connector.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        convert(tmp_path / "missing.toml")


BOTH = """
connector_name = "relay"
danube_service_url = "http://first:6650"
[registry]
type = "danube"
[[schemas]]
topic = "/default/out"
schema_type = "json_schema"
subject = "out"
[source]
connector = "danube"
topics = ["/default/in"]
subscription = "relay"
[[routes]]
to = "/default/out"
[sink]
connector = "danube"
"""


class TestTheUrlOfTheFile:
    @pytest.fixture(autouse=True)
    def _bare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("DANUBE_SERVICE_URL", raising=False)

    def read(self, directory: Path, text: str) -> tuple[str, str, str]:
        (directory / "pipeline.toml").write_text(text)
        found = Pipeline.from_toml(directory / "pipeline.toml")
        registry = found.schemas.registry.config
        return found.sources["danube"].config.url, found.sinks["danube"].config.url, getattr(registry, "url", "")

    def test_serves_every_section_that_has_none(self, tmp_path: Path) -> None:
        assert self.read(tmp_path, BOTH) == ("http://first:6650",) * 3
        own = BOTH.replace('[sink]\nconnector = "danube"', '[sink]\nconnector = "danube"\nurl = "http://other:6650"')
        assert self.read(tmp_path, own) == ("http://first:6650", "http://other:6650", "http://first:6650")

    def test_is_overridden_by_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DANUBE_SERVICE_URL", "http://second:6650")
        assert self.read(tmp_path, BOTH) == ("http://second:6650",) * 3
        without = BOTH.replace('danube_service_url = "http://first:6650"\n', "")
        assert self.read(tmp_path, without) == ("http://second:6650",) * 3

    def test_is_missed_where_nobody_gives_it(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="needs 'url'"):
            self.read(tmp_path, BOTH.replace('danube_service_url = "http://first:6650"\n', ""))

    def test_is_refused_where_nothing_uses_it(self, tmp_path: Path) -> None:
        text = 'connector_name = "x"\ndanube_service_url = "http://first:6650"\n'
        text += '[source]\nconnector = "generator"\nstreams = ["a"]\n[sink]\nconnector = "console"\n'
        with pytest.raises(ConfigError, match="nothing in the file uses 'danube_service_url'"):
            self.read(tmp_path, text)

    def test_a_file_of_theirs_that_is_run_as_it_is_says_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="--from-danube"):
            self.read(tmp_path, THEIRS)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[core]\nconnector_name = "shop"\n', r"\[core\]"),
        ('connector_name = "shop"\n[server]\nport = 1\n[[endpoints]]\npath = "/in"\n', r"\[\[endpoints\]\]"),
        ('connector_name = "shop"\n[[deltalake.topic_mappings]]\ntopic = "/a/b"\n', r"deltalake\.topic_mappings"),
    ],
)
def test_a_file_of_an_earlier_version_is_refused_and_not_moved_without_its_routes(
    tmp_path: Path, text: str, what: str
) -> None:
    file = tmp_path / "connector.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"earlier Danube Connect: it has .*{what}"):
        convert(file)


@pytest.mark.parametrize("kind", ["api_key", "HMAC", ""])
def test_a_webhook_is_not_left_open_where_its_credentials_are_misspelled(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "connector.toml"
    file.write_text(WEBHOOK.replace('type = "apikey"', f'type = "{kind}"'))
    with pytest.raises(ConfigError, match=f"has the type '{kind}'"):
        convert(file)


def test_a_signature_whose_header_is_not_named_is_looked_for_where_theirs_looks(tmp_path: Path) -> None:
    text = WEBHOOK.replace('type = "apikey"', 'type = "hmac"').replace('header = "x-api-key"\n', "")
    made, _ = written(tmp_path, text)
    [source] = tomllib.loads(made.read_text())["sources"]
    assert source["auth"]["header"] == "X-Signature"


def moved(directory: Path, text: str) -> dict[str, Any]:
    file = directory / "connector.toml"
    file.write_text(f'connector_name = "x"\n{text}')
    return tomllib.loads(convert(file).text("connector.toml"))


def test_the_first_route_of_mqtt_that_takes_a_message_is_the_only_one(tmp_path: Path) -> None:
    filters = ["sensors/+/zone1", "devices/+/telemetry", "sensors/temp/#", "$share/g/sensors/temp/zone1", "sensors/+"]
    routes = "".join(f'[[mqtt.routes]]\nfrom = "{each}"\nto = "/a/{at}"\n' for at, each in enumerate(filters))
    found = [each.get("exclude") for each in moved(tmp_path, f"[mqtt]\n{routes}")["routes"]]
    first, _, third = filters[:3]
    assert found == [None, None, [first], [first, third], [third]]


def test_payloads_called_avro_are_json_there_and_json_is_a_json_schema(tmp_path: Path) -> None:
    schema = '[[schemas]]\ntopic = "/a/{}"\nsubject = "{}-v1"\nschema_type = "{}"\nschema_file = "x"\n'
    schemas = schema.format("b", "b", "Avro") + schema.format("c", "c", "json")
    routes = "".join(f'[[mqtt.routes]]\nfrom = "{name}"\nto = "/a/{name}"\n' for name in "bc")
    found = moved(tmp_path, f"[mqtt]\n{routes}{schemas}")
    assert [(each["topic"], each["schema_type"]) for each in found["schemas"]] == [("/a/c", "json_schema")]
    assert [each.get("schema_subject") for each in found["sinks"]] == ["b-v1", None]
