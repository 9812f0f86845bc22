"""`penstock init --from-danube`: a pipeline file from one of Danube Connect, and what of it could not be carried over."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

Table = dict[str, Any]

TYPES = {
    "Utf8": "STRING", "Binary": "BINARY", "Boolean": "BOOLEAN", "Float32": "FLOAT", "Float64": "DOUBLE",
    "Int8": "TINYINT", "Int16": "SMALLINT", "Int32": "INT", "Int64": "BIGINT",
    "UInt8": "SMALLINT", "UInt16": "INT", "UInt32": "BIGINT", "UInt64": "BIGINT",
    "Timestamp": "TIMESTAMP", "Date32": "DATE", "Date64": "DATE",
}  # fmt: skip
"""Column types of the Delta sink there, as Spark's SQL names them: those of the tables that it made."""

CORRUPT = "_not_json"
"""The member in which Spark keeps a payload that is no JSON."""

PLAIN = ("string", "bytes", "number")
"""Schema types without a text: only their subject is known to the registry."""


@dataclass
class Moved:
    """What becomes of a file: sections of ours, and notes on what is different or left out."""

    root: Table = field(default_factory=dict)
    processing: Table = field(default_factory=dict)
    schemas: list[Table] = field(default_factory=list)
    sources: list[Table] = field(default_factory=list)
    routes: list[Table] = field(default_factory=list)
    sinks: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    registry: bool = False

    def leave(self, place: str, left: Mapping[str, Any]) -> None:
        """Name the keys that have no place here."""
        if ways := _ways(left):
            self.notes.append(f"{place}: there is nothing here like {', '.join(ways)}")

    def text(self, origin: str) -> str:
        lines = [f"# From {origin}, a file of Danube Connect."]
        if self.notes:
            lines += ["# Not carried over, or different here:", *(f"# - {note}" for note in self.notes)]
        lines += ["", *_pairs(self.root), "", "[processing]", *_pairs(self.processing)]
        if self.registry:
            lines += ["", "[registry]", 'type = "danube"']
        sections = ("schemas", self.schemas), ("sources", self.sources), ("routes", self.routes), ("sinks", self.sinks)
        for name, tables in sections:
            for table in tables:
                lines += ["", f"[[{name}]]", *_pairs(table)]
        return "\n".join(lines) + "\n"


def _earlier(data: Table) -> str | None:
    """What only earlier versions called so: moved without it, the pipeline would be empty."""
    mapped = next((name for name, table in data.items() if isinstance(table, dict) and "topic_mappings" in table), None)
    if mapped is not None:
        return f"[[{mapped}.topic_mappings]]"
    return "[core]" if "core" in data else "[[endpoints]]" if "endpoints" in data else None


def convert(file: Path) -> Moved:
    """Read a file of Danube Connect."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", code="PEN-1015") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no TOML file: {error}", code="PEN-1001") from error
    if old := _earlier(data):
        raise ConfigError(
            f"{file} is a file of an earlier Danube Connect: it has {old}",
            code="PEN-1016",
            hint="write it as the newest version takes it, with the names at the top and [[routes]], and try again",
        )
    if "connector_name" not in data and "danube_service_url" not in data:
        raise ConfigError(
            f"{file} is no file of Danube Connect: it has neither connector_name nor danube_service_url",
            code="PEN-1016",
            hint="name the connector.toml that CONNECTOR_CONFIG_PATH names there",
        )
    try:
        return _moved(data)
    except KeyError as missing:
        raise ConfigError(f"{file}: an entry has no {missing}", code="PEN-1016", hint=_COMPLETE) from missing
    except (TypeError, AttributeError, ValueError) as error:
        what = f"{file}: a key holds another kind of value than Danube Connect has there ({error})"
        raise ConfigError(what, code="PEN-1016", hint=_COMPLETE) from error


_COMPLETE = "correct it there first: a file that its own connector takes is carried over"


def _moved(data: Table) -> Moved:
    moved = Moved()
    moved.root["connector_name"] = data.pop("connector_name", "pipeline")
    moved.root["danube_service_url"] = data.pop("danube_service_url", "http://localhost:6650")
    given = {
        **({"metrics_port": data.pop("metrics_port")} if "metrics_port" in data else {}),
        **data.pop("processing", {}),
    }
    kind = next((name for name in KINDS if name in data), None)
    _processing(moved, given, data.pop("retry", {}))
    if kind is not None:
        KINDS[kind](moved, data)
    else:
        _unknown(moved, data)
    moved.leave("the file", data)
    return moved


def _processing(moved: Moved, given: Table, retry: Table) -> None:
    for section in (given, retry):
        for key in ("poll_interval_ms", "metrics_port", "max_retries", "retry_backoff_ms", "max_backoff_ms"):
            if key in section:
                moved.processing[key] = section.pop(key)
    if "log_level" in given:
        level = str(given.pop("log_level")).lower()
        moved.processing["log_level"] = {"warn": "warning", "trace": "debug"}.get(level, level)
    if "batch_timeout_ms" in given:
        moved.processing["epoch_interval_ms"] = given.pop("batch_timeout_ms")
    if given.pop("batch_size", None) is not None:
        moved.notes.append("processing.batch_size: an epoch takes what has come; max_epoch_rows bounds it")
    moved.leave("[processing]", given)
    moved.leave("[retry]", retry)


def _schemas(moved: Moved, entries: Sequence[Table], **more: Any) -> dict[str, Table]:
    """`[[schemas]]` of a source there, with `more` in each. Answers with what only the sink's producers name, by topic."""
    named: dict[str, Table] = {}
    for given in entries:
        topic, kind = given["topic"], str(given["schema_type"]).lower()
        kind = "json_schema" if kind == "json" else kind  # two names of one thing there
        subject, strategy = given.get("subject"), given.get("version_strategy", "latest")
        chosen = {} if strategy == "latest" else {"version_strategy": strategy}
        if kind == "avro":
            named[topic] = {"schema_subject": subject, **chosen} if subject else {}
            moved.notes.append(
                f"[[schemas]] of {topic}: payloads are JSON there, whatever Avro says, and go on as they come; "
                f"its subject {subject} must be registered already"
            )
            continue
        entry: Table = {"topic": topic, "schema_type": kind}
        if kind in PLAIN:
            if subject:
                made = {"schema_type": kind} if given.get("auto_register", True) else {}
                named[topic] = {"schema_subject": subject, **made, **chosen}
        else:
            kept = ("subject", "schema_file", "auto_register", "version_strategy")
            entry |= {key: given[key] for key in kept if given.get(key) not in (None, "")}
            moved.registry = True
        moved.schemas.append(entry | more)
    if moved.schemas:
        moved.processing["on_error"] = "dead_letter"
    return named


def _to_danube(
    moved: Moved,
    routes: Sequence[Table],
    stream: Callable[[Table], str],
    named: Mapping[str, Table],
    **more: Any,
) -> None:
    """Routes to Danube's topics: one sink for each way in which topics are made there, with `more` in each."""
    names: dict[tuple[Any, ...], str] = {}
    for route in routes:
        topic = route.pop("to")
        schema = named.get(topic, {})
        made = (route.pop("partitions", 0), route.pop("reliable_dispatch", True), json.dumps(schema, sort_keys=True))
        if made not in names:
            names[made] = f"danube-{len(names) + 1}" if names else "danube"
            sink: Table = {"name": names[made], "connector": "danube", "partitions": made[0]}
            sink |= {} if made[1] else {"reliable_dispatch": False}
            moved.sinks.append(sink | more | schema)
        pattern = stream(route)
        earlier = [each["from"] for each in moved.routes if _overlap(each["from"].split("/"), pattern.split("/"))]
        first = {"exclude": earlier} if earlier else {}  # there, the first route that takes a message is the only one
        moved.routes.append({"from": pattern, **first, "to": topic, "sinks": [names[made]]})


def _overlap(one: Sequence[str], other: Sequence[str]) -> bool:
    """True if some topic of MQTT has the levels of both filters."""
    for mine, theirs in zip_longest(one, other):
        if "#" in (mine, theirs):
            return True
        if mine is None or theirs is None or (mine != theirs and "+" not in (mine, theirs)):
            return False
    return True


def _mqtt(moved: Moved, data: Table) -> None:
    given = data.pop("mqtt")
    secure = given.pop("use_tls", False)
    host, port = given.pop("broker_host", "localhost"), given.pop("broker_port", 1883)
    source: Table = {"name": "mqtt", "connector": "mqtt", "url": f"mqtt{'s' if secure else ''}://{host}:{port}"}
    source["version"] = "3.1.1"  # what their client speaks
    names = {"client_id": "client_id", "username": "username", "keep_alive_secs": "keepalive_secs"}
    names["connection_timeout_secs"] = "timeout_secs"
    source |= {ours: given.pop(theirs) for theirs, ours in names.items() if theirs in given}
    if given.pop("password", None) is not None:
        source["password"] = {"env": "MQTT_PASSWORD"}
        moved.notes.append("mqtt.password: secrets are references here; export MQTT_PASSWORD")
    if given.pop("clean_session", True):
        moved.notes.append(
            "mqtt.clean_session: the session is kept, so that nothing is lost while the pipeline is away"
        )
    if given.pop("include_metadata", True):
        moved.notes.append(
            "mqtt.include_metadata: the attribute _stream has the MQTT topic, mqtt.retained says if it was retained; "
            "mqtt.qos and mqtt.dup are left out"
        )
    given.pop("tcp_nodelay", None)  # always so
    routes = given.pop("routes", [])
    levels = {"AtMostOnce": 0, "AtLeastOnce": 1, "ExactlyOnce": 2}
    qos = [levels.get(route.pop("qos", "AtLeastOnce"), 1) for route in routes]
    for route, level in zip(routes, qos, strict=True):
        route.setdefault("reliable_dispatch", level > 0)
    source["topics"] = [{"filter": route["from"], "qos": level} for route, level in zip(routes, qos, strict=True)]
    moved.sources.append(source)
    named = _schemas(moved, data.pop("schemas", []), metadata=["stream"])
    own = {"key": ["_stream"], "attributes": ["_stream"]}  # what one device sent stays in its order
    _to_danube(moved, routes, lambda route: _shared_name(route.pop("from")), named, **own)
    moved.leave("[mqtt]", {**given, "routes": routes})


def _shared_name(pattern: str) -> str:
    """The streams of a filter: a shared subscription has the topics without its prefix."""
    return pattern.split("/", 2)[2] if pattern.startswith("$share/") else pattern


def _webhook(moved: Moved, data: Table) -> None:
    server, limit = data.pop("server"), data.pop("rate_limit", {})
    source: Table = {"name": "webhook", "connector": "webhook", "port": server.pop("port", 8080)}
    source["host"] = server.pop("host", "0.0.0.0")
    names = {"timeout_seconds": "request_timeout_secs", "max_body_size": "max_body_bytes"}
    source |= {ours: server.pop(theirs) for theirs, ours in names.items() if theirs in server}
    if "tls_cert_path" in server:
        source["tls"] = {"cert_file": server.pop("tls_cert_path"), "key_file": server.pop("tls_key_path", "")}
    auth = data.pop("auth", {})
    source["auth"] = _auth(auth)
    moved.leave("[auth]", auth)
    if "requests_per_second" in limit:
        source["rate_limit_per_sec"] = limit.pop("requests_per_second")
    if limit.pop("per_ip_enabled", False):
        source["client_rate_limit_per_sec"] = limit.pop("per_ip_requests_per_second", None)
    limit.pop("per_ip_requests_per_second", None)  # without effect there, too
    routes = data.pop("routes", [])
    for route in routes:
        route.setdefault("reliable_dispatch", False)
    source["endpoints"] = [{"path": route["from"], "stream": route["from"].strip("/")} for route in routes]
    moved.sources.append({key: value for key, value in source.items() if value is not None})
    named = _schemas(moved, data.pop("schemas", []))
    _to_danube(moved, routes, lambda route: str(route.pop("from")).strip("/"), named)
    moved.notes.append(
        "webhook.… attributes: `headers` of an endpoint makes attributes of what a request says beside its body"
    )
    for name, rest in (("[server]", server), ("[rate_limit]", limit), ("[[routes]]", {"routes": routes})):
        moved.leave(name, rest)


def _auth(given: Table) -> Table:
    kind, secret = given.pop("type", "none"), {"env": given.pop("secret_env", "WEBHOOK_SECRET")}
    header, algorithm = given.pop("header", None), given.pop("algorithm", None)
    if kind == "apikey":
        return {"type": "api_key", "keys": [secret], "header": header or "X-API-Key"}
    if kind == "hmac":
        preset = {"stripe-signature": "stripe", "x-hub-signature-256": "github"}.get(str(header).lower())
        if preset is not None:
            return {"type": "hmac", "secrets": [secret], "preset": preset}
        return {
            "type": "hmac",
            "secrets": [secret],
            "header": header or "X-Signature",
            "algorithm": algorithm or "sha256",
        }
    if kind == "jwt":
        if "public_key_path" in given:
            return {"type": "jwt", "algorithms": ["RS256"], "key_file": given.pop("public_key_path")}
        return {"type": "jwt", "algorithms": ["HS256"], "secret": secret}
    if kind != "none":  # its own connector refuses it, too; ours must not be open to all instead
        raise ConfigError(
            f"[auth] has the type {kind!r}, which Danube Connect does not have",
            code="PEN-1016",
            hint='write "apikey", "hmac", "jwt" or "none" there',
        )
    return {"type": "none"}


def _delta(moved: Moved, data: Table) -> None:
    given = data.pop("deltalake")
    backend = given.pop("storage_backend", "s3")
    names = {"s3_region": "region", "s3_endpoint": "endpoint", "s3_allow_http": "allow_http"}
    names |= {"azure_storage_account": "account_name"}
    storage = {ours: given.pop(theirs) for theirs, ours in names.items() if theirs in given}
    for key in ("azure_container", "gcp_project_id"):
        given.pop(key, None)  # the paths say it
    keys = {"s3": {"access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY"}}
    keys["azure"] = {"account_key": "AZURE_STORAGE_ACCOUNT_KEY"}
    storage |= {option: {"env": name} for option, name in keys.get(backend, {}).items()}
    if storage:
        moved.notes.append(
            "deltalake credentials: read from the same variables; leave them out to use the machine's role"
        )
    for route in given.pop("routes", []):
        topic, path = route.pop("from"), route.pop("to")
        name = path.rstrip("/").rpartition("/")[2] or "delta"
        sink: Table = {"name": _free(name, moved.sinks), "connector": "delta", "path": path}
        moved.sinks.append(sink | ({"storage_options": storage} if storage else {}))
        with_metadata = route.pop("include_danube_metadata", False)
        beside = {"metadata": ["timestamp", "stream"]} if with_metadata else {}
        moved.schemas.append({"topic": topic, "schema_type": "string", **beside})  # and the query reads it
        if with_metadata:
            moved.notes.append(f"_danube_metadata of {topic}: timestamp_iso is when the message was published, in UTC")
        if route.pop("write_mode", "append") != "append":
            moved.notes.append(f'write_mode of {topic}: tables are appended to; mode = "upsert" keeps one row per key')
        fields = route.pop("field_mappings", None) or route["field_mappings"]  # one without is none that is whole
        if needed := [each["column"] for each in fields if not each.get("nullable", True)]:
            moved.notes.append(f"nullable = false of {topic}: rows without {', '.join(needed)} become dead letters")
        found = {"source": _reading(moved, topic, route), "from": topic, "to": topic, "sinks": [sink["name"]]}
        moved.routes.append({**found, "sql": _select(fields, with_metadata)})
        moved.leave(f"[[deltalake.routes]] of {topic}", route)
    moved.processing["on_error"] = "dead_letter"
    moved.leave("[deltalake]", given)


def _select(fields: Sequence[Table], with_metadata: bool) -> str:
    """
    The columns of a table, as their mappings say.

    Payloads are read by the mappings alone: a member that no message has had yet is null, and what is no JSON, is of another
    type, or lacks what must not be null, is a row that the query fails on: a dead letter.
    """
    shape: Table = {}
    for each in fields:
        *ways, last = each["json_path"].split(".")
        place = shape
        for way in ways:
            place[way] = place.get(way) or {}
            place = place[way]
        place.setdefault(last, {})
    columns = [f"    {_column(each)} AS {_quoted(each['column'])}" for each in fields]
    beside = ""
    if with_metadata:
        said = "'topic', `_stream`, 'timestamp', unix_millis(`_timestamp`), 'timestamp_iso', `_timestamp`"
        columns.append(f"    to_json(named_struct({said})) AS `_danube_metadata`")
        beside = ", `_stream`, `_timestamp`"
    # Not FAILFAST: what that raises of a payload that is no JSON is not known as an error of its row, and stops the run.
    kept = f"{_members(shape, ' ')}, {_quoted(CORRUPT)} STRING"
    read = f"from_json(`value`, {_text(kept)}, map('columnNameOfCorruptRecord', {_text(CORRUPT)}))"
    listed = ",\n".join(columns)
    is_whole = f"assert_true(`json`.{_quoted(CORRUPT)} IS NULL, 'the payload is no JSON object') IS NULL"
    return f"SELECT\n{listed}\nFROM (SELECT {read} AS `json`{beside} FROM input)\nWHERE {is_whole}\n"


def _members(shape: Table, mark: str) -> str:
    kinds = ((name, f"STRUCT<{_members(below, ': ')}>" if below else "STRING") for name, below in shape.items())
    return ", ".join(f"{_quoted(name)}{mark}{kind}" for name, kind in kinds)


def _column(given: Table) -> str:
    """A value as text becomes its type: times are text, or microseconds since 1970; bytes are in hex."""
    found = ".".join(["`json`", *map(_quoted, given["json_path"].split("."))])
    kind = given["data_type"]
    if kind == "Binary":
        made = f"to_binary({found}, 'hex')"
    elif kind == "Timestamp":
        number = f"timestamp_micros(CAST({found} AS BIGINT))"
        made = f"CASE WHEN {found} RLIKE '^-?[0-9]+$' THEN {number} ELSE CAST({found} AS TIMESTAMP) END"
    else:
        made = found if kind == "Utf8" else f"CAST({found} AS {TYPES.get(kind, 'STRING')})"
    if given.get("nullable", True):
        return made
    return f"coalesce({made}, raise_error({_text(given['json_path'] + ' is null')}))"


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _text(value: str) -> str:
    """A string of SQL."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _reading(moved: Moved, topic: str, route: Table, default: str = "Exclusive") -> str:
    """The source that reads a topic, by its subscription; several topics may share one."""
    kind = str(route.pop("subscription_type", default)).lower()
    options: Table = {"subscription": route.pop("subscription", moved.root["connector_name"])}
    options |= {} if kind == "exclusive" else {"subscription_type": kind}
    if subject := route.pop("expected_schema_subject", None):
        options["expected_schema_subject"] = subject
    for source in moved.sources:
        if {key: source[key] for key in source if key not in ("name", "connector", "topics")} == options:
            source["topics"].append(topic)
            return str(source["name"])
    name = _free(options["subscription"], moved.sources)
    moved.sources.append({"name": name, "connector": "danube", "topics": [topic], **options})
    return name


def _unknown(moved: Moved, data: Table) -> None:
    """A sink or source that Penstock does not have: what is Danube's is kept, and the rest is named."""
    name = next((key for key, value in data.items() if isinstance(value, dict) and "routes" in value), None)
    given = data[name] if name is not None else {}
    for route in given.pop("routes", []):
        topic = route.pop("from")
        kind = "Shared" if name == "surrealdb" else "Exclusive"  # their defaults
        moved.routes.append({"source": _reading(moved, topic, route, kind), "from": topic, "to": topic})
        moved.leave(f"[[{name}.routes]] of {topic}", route)
    moved.schemas += [{"topic": each["from"], "schema_type": "json"} for each in moved.routes]
    if not moved.sources:
        moved.sources.append({"name": "danube", "connector": "danube", "topics": ["/default/events"]})
        moved.sources[-1]["subscription"] = moved.root["connector_name"]
        moved.notes.append("no routes of a known form: /default/events takes their place")
    moved.sinks.append({"name": "screen", "connector": "console"})
    moved.notes.append(
        f"there is no connector for {name or 'this file'}: `console` takes its place; choose another sink"
    )


KINDS: dict[str, Callable[[Moved, Table], None]] = {"mqtt": _mqtt, "server": _webhook, "deltalake": _delta}
"""The connectors of Danube Connect that have one here, by the section that only they have."""


def _free(name: str, taken: Sequence[Table]) -> str:
    found, number = name, 1
    while any(each["name"] == found for each in taken):
        found, number = f"{name}-{number + 1}", number + 1
    return found


def _ways(table: Mapping[str, Any], before: str = "") -> list[str]:
    """The keys that are left, each with the way to it."""
    found: list[str] = []
    for key, value in table.items():
        way = f"{before}{key}"
        if isinstance(value, dict):
            found += _ways(value, f"{way}.")
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            found += [left for number, each in enumerate(value, 1) for left in _ways(each, f"{way}.{number}.")]
        elif value != []:
            found.append(way)
    return found


def _pairs(table: Table) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items()]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(_pairs(value)) + " }"
    if isinstance(value, list) and len(value) > 1 and isinstance(value[0], dict):
        return "[\n" + "".join(f"    {_value(each)},\n" for each in value) + "]"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str) and "\n" in value:
        lines = value.replace("\\", "\\\\").replace('"""', '""\\"')
        return f'"""\n{lines}"""'
    return json.dumps(value, ensure_ascii=False)
