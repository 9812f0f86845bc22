"""The schema registry of a test broker: an id per subject, versions below it, and what a new one must keep."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

import grpc
from danube.proto import SchemaRegistry_pb2 as messages
from danube.proto.SchemaRegistry_pb2_grpc import SchemaRegistryServicer

from penstock.testing.danube.options import Metadata
from penstock.testing.danube.topics import Topics

TYPES = {
    "bytes": "bytes", "string": "string", "number": "number", "int": "number", "int64": "number", "float": "number",
    "double": "number", "avro": "avro", "json_schema": "json_schema", "json": "json_schema", "protobuf": "protobuf",
    "proto": "protobuf",
}  # fmt: skip
VARIANTS = {"avro": "Avro", "json_schema": "JsonSchema", "protobuf": "Protobuf"}


class Subjects(SchemaRegistryServicer):  # type: ignore[misc]
    """Answers as the real one does: a definition is the JSON of its own record, and refusals are INTERNAL errors."""

    def __init__(self, metadata: Metadata, topics: Topics) -> None:
        self._metadata = metadata
        self._subjects = metadata.subjects
        self._topics = topics
        self._first: dict[tuple[str, int], int] = {}

    async def RegisterSchema(self, request: Any, context: Any) -> Any:
        kind, text = request.schema_type, request.schema_definition.decode()
        if kind.lower() not in TYPES:
            await context.abort(grpc.StatusCode.INTERNAL, f"Failed to register schema: Unknown schema type: {kind}")
        kind = TYPES[kind.lower()]
        print_ = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}" if kind in VARIANTS else kind
        known = self._subjects.get(request.subject, {})
        for each in known.get("versions", ()):
            if each["fingerprint"] == print_:
                return messages.RegisterSchemaResponse(
                    schema_id=known["id"], version=each["version"], is_new_version=False, fingerprint=print_
                )
        wrong = _invalid(kind, text)
        if wrong:
            await context.abort(grpc.StatusCode.INTERNAL, f"Failed to register schema: {wrong}")
        if known:
            problems = _problems(known, kind, text, known["mode"])
            if problems:
                why = f"Schema is not compatible with subject '{request.subject}': {'; '.join(problems)}"
                await context.abort(grpc.StatusCode.INTERNAL, f"Failed to register schema: {why}")
        else:
            known = {"id": 1 + len(self._subjects), "mode": "backward", "versions": []}
            self._subjects[request.subject] = known
        number = 1 + max((each["version"] for each in known["versions"]), default=0)
        known["versions"].append(
            {"version": number, "type": kind, "text": text, "fingerprint": print_, "at": int(time.time())}
        )
        self._metadata.save()
        return messages.RegisterSchemaResponse(
            schema_id=known["id"], version=number, is_new_version=True, fingerprint=print_
        )

    async def GetSchema(self, request: Any, context: Any) -> Any:
        for subject, known in self._subjects.items():
            if known["id"] == request.schema_id:
                wanted = request.version if request.HasField("version") else known["versions"][-1]["version"]
                for each in known["versions"]:
                    if each["version"] == wanted:
                        return _answer(subject, known, each)
        await context.abort(grpc.StatusCode.NOT_FOUND, f"Schema not found for ID: {request.schema_id}")
        return None

    async def GetLatestSchema(self, request: Any, context: Any) -> Any:
        known = await self._known(request.subject, context, "Schema not found for subject")
        return _answer(request.subject, known, known["versions"][-1])

    async def ListVersions(self, request: Any, context: Any) -> Any:
        known = await self._known(request.subject, context, "Subject not found")
        listed = [
            messages.SchemaVersionInfo(
                version=each["version"], created_at=each["at"], fingerprint=each["fingerprint"], schema_id=known["id"]
            )
            for each in known["versions"]
        ]
        return messages.ListVersionsResponse(versions=listed)

    def listing(self) -> Any:
        """ListSubjects, which the shipped stubs lack, written by hand: names in field 1 of entries in field 1."""

        async def listed(request: Any, context: Any) -> bytes:
            entries = (_field(1, subject.encode()) for subject in self._subjects)
            return b"".join(_field(1, each) for each in entries)

        handler = grpc.unary_unary_rpc_method_handler(listed)
        return grpc.method_handlers_generic_handler("danube_schema.SchemaRegistry", {"ListSubjects": handler})

    async def CheckCompatibility(self, request: Any, context: Any) -> Any:
        known = self._subjects.get(request.subject)
        if known is None:
            await context.abort(grpc.StatusCode.INTERNAL, "Failed to check compatibility: no such subject")
            return None
        mode = request.compatibility_mode if request.HasField("compatibility_mode") else known["mode"]
        if wrong := _invalid(TYPES[request.schema_type], request.new_schema_definition.decode()):
            await context.abort(grpc.StatusCode.INTERNAL, f"Failed to check compatibility: {wrong}")
        problems = _problems(known, TYPES[request.schema_type], request.new_schema_definition.decode(), mode)
        return messages.CheckCompatibilityResponse(is_compatible=not problems, errors=problems)

    async def SetCompatibilityMode(self, request: Any, context: Any) -> Any:
        if request.compatibility_mode.lower() not in ("none", "backward", "forward", "full"):
            what = f"Invalid compatibility mode: {request.compatibility_mode}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, what)
        if request.subject not in self._subjects:
            await context.abort(grpc.StatusCode.INTERNAL, "Failed to set compatibility mode: no such subject")
        self._subjects[request.subject]["mode"] = request.compatibility_mode.lower()
        self._metadata.save()
        return messages.SetCompatibilityModeResponse(success=True)

    async def ConfigureTopicSchema(self, request: Any, context: Any) -> Any:
        await self._known(request.schema_subject, context, "Schema subject not found in registry")
        if self._topics.find(request.topic_name) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Topic {request.topic_name} not found")
        if request.validation_policy not in ("none", "warn", "enforce"):
            what = f"Invalid validation policy: {request.validation_policy!r}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, what)
        self._topics.facts(request.topic_name).update(
            subject=request.schema_subject, policy=request.validation_policy, payload=request.enable_payload_validation
        )
        self._metadata.save()
        return messages.ConfigureTopicSchemaResponse(success=True)

    async def GetTopicSchemaConfig(self, request: Any, context: Any) -> Any:
        if self._topics.find(request.topic_name) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Topic {request.topic_name} not found")
        facts = self._topics.facts(request.topic_name)
        return messages.GetTopicSchemaConfigResponse(
            schema_subject=facts["subject"],
            validation_policy=facts["policy"],
            enable_payload_validation=facts["payload"],
            schema_id=self._subjects.get(facts["subject"], {}).get("id", 0),
        )

    def subject_of(self, schema_id: int) -> str | None:
        return next((subject for subject, known in self._subjects.items() if known["id"] == schema_id), None)

    def refusal(self, topic: str, message: Any) -> str:
        """
        Why a topic does not take a message; empty: it does.

        As the real one (0.15.1) decides: `warn` too refuses an id that nobody knows and a payload that does not fit, and the
        version that the first message of a subject names counts for all that follow, since they have one id.
        """
        facts = self._topics.facts(topic)
        policy, subject = facts["policy"], facts["subject"]
        if policy == "none":
            return ""
        if not subject:
            said = f"Topic {topic} requires schema but none is configured"
        elif not message.HasField("schema_id"):
            said = f"Message missing schema_id for topic {topic} (expected subject: {subject})"
        elif (named := self.subject_of(message.schema_id)) is None:
            return f"Schema ID {message.schema_id} not found in registry"
        elif named != subject:
            said = (
                f"Schema subject mismatch for topic {topic}: message schema_id={message.schema_id} belongs to {named!r}"
            )
        else:
            version = self._first.setdefault((topic, message.schema_id), message.schema_version or 1)
            return self._unfit(subject, version, message.payload) if facts["payload"] else ""
        return said if policy == "enforce" else ""

    def _unfit(self, subject: str, version: int, payload: bytes) -> str:
        each = next(each for each in self._subjects[subject]["versions"] if each["version"] == version)
        if each["type"] != "json_schema":
            return ""
        import jsonschema_rs  # here: few topics have a payload checked

        try:
            jsonschema_rs.validate(json.loads(each["text"]), json.loads(payload))
        except (jsonschema_rs.ValidationError, ValueError) as error:
            return f"Payload validation failed: {str(error).splitlines()[0]}"
        return ""

    def has(self, subject: str) -> bool:
        return subject in self._subjects

    async def _known(self, subject: str, context: Any, what: str) -> dict[str, Any]:
        if subject not in self._subjects:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{what}: {subject}")
        return self._subjects[subject]


def _field(number: int, data: bytes) -> bytes:
    size, length = b"", len(data)
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + data


def _answer(subject: str, known: dict[str, Any], each: dict[str, Any]) -> Any:
    return messages.GetSchemaResponse(
        schema_id=known["id"],
        version=each["version"],
        subject=subject,
        schema_type=each["type"],
        schema_definition=json.dumps(_definition(each)).encode(),
        created_at=each["at"],
        fingerprint=each["fingerprint"],
        compatibility_mode=known["mode"],
    )


def _definition(each: dict[str, Any]) -> Any:
    """As the real broker writes it: the record of its own enum, and not what was registered."""
    kind = each["type"]
    if kind == "protobuf":
        return {
            "Protobuf": {
                "raw_proto": each["text"],
                "message_name": "DefaultMessage",
                "fingerprint": each["fingerprint"],
            }
        }
    if kind in VARIANTS:
        return {VARIANTS[kind]: {"raw_schema": each["text"], "fingerprint": each["fingerprint"]}}
    return kind.capitalize()


def _invalid(kind: str, text: str) -> str:
    """What is wrong with a schema by itself."""
    if kind not in VARIANTS:
        return ""
    from penstock.errors import ConnectorError  # here: a broker starts in a moment, and few have schemas
    from penstock.formats import WireSchema
    from penstock.schema.compatibility import Compatibility, incompatibilities

    try:
        incompatibilities(Compatibility.FULL, [WireSchema(kind, text, "s", 1)], WireSchema(kind, text, "s", 2))
    except ConnectorError as error:
        return str(error)
    return ""


def _problems(known: dict[str, Any], kind: str, text: str, mode: str) -> list[str]:
    """
    What the real one finds, which is less than there is: against the latest version only, and only at the top level.

    Of Avro records it looks at the name and at new fields without a default; Protobuf it does not compare at all.
    """
    latest = known["versions"][-1]
    if mode == "none":
        return []
    if latest["type"] != kind:
        return [f"Schema type changed from {latest['type']} to {kind}"]
    if kind not in ("avro", "json_schema"):
        return []
    old, new = json.loads(latest["text"]), json.loads(text)
    compare = _avro if kind == "avro" else _json
    found = compare(new, old, "Backward") if mode in ("backward", "full") else []
    return found or (compare(old, new, "Forward") if mode in ("forward", "full") else [])


def _avro(reader: Any, writer: Any, way: str) -> list[str]:
    if not (isinstance(reader, dict) and isinstance(writer, dict) and "fields" in reader and "fields" in writer):
        return []
    written = {each["name"] for each in writer["fields"]}
    lacking = [each for each in reader["fields"] if each["name"] not in written]
    if reader["name"] == writer["name"] and all(
        "default" in each or isinstance(each["type"], list) for each in lacking
    ):
        return []
    return [f"{way} incompatible: the reader cannot read what the writer wrote"]


def _json(reader: Any, writer: Any, way: str) -> list[str]:
    ours, theirs = reader.get("properties", {}), writer.get("properties", {})
    changed = [name for name in ours if name in theirs and ours[name].get("type") != theirs[name].get("type")]
    return [f"{way} incompatible: changed type of field '{name}'" for name in changed]
