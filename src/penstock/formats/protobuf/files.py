"""Protobuf's schemas: a `.proto` file or a descriptor set, compiled, and the messages in them."""

from __future__ import annotations

import base64
import binascii
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import DecodeError

from penstock.errors import SchemaError
from penstock.formats import WireSchema

COMPILE_SECS = 60

_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+=*\s*\Z")
_MAIN = "schema.proto"


@lru_cache(maxsize=64)
def compiled(schema: WireSchema) -> bytes:
    """The schema as a descriptor set; its last file is the schema itself, those before it are what it imports."""
    if not _BASE64.match(schema.text):
        return _compile(schema)
    try:
        data = base64.b64decode(schema.text, validate=False)
        if not descriptor_pb2.FileDescriptorSet.FromString(data).file:
            raise SchemaError("the descriptor set holds no file", hint="write it with protoc --descriptor_set_out")
    except (binascii.Error, DecodeError) as error:
        raise SchemaError(
            f"neither a .proto file nor a descriptor set in base64: {error}",
            hint="write the set with protoc --include_imports --descriptor_set_out, and base64",
        ) from error
    return data


def as_text(data: bytes) -> str:
    """A descriptor set as a schema's text."""
    return base64.b64encode(data).decode()


def _compile(schema: WireSchema) -> bytes:
    """By the compiler of the project itself, in a process of its own: what it says of an error comes on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), _MAIN, schema)
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", "--include_imports"]
        done = subprocess.run(
            [*command, f"--descriptor_set_out={folder}/set", _MAIN],
            capture_output=True,
            text=True,
            check=False,
            timeout=COMPILE_SECS,
            cwd=folder,
        )
        if done.returncode:
            said = (done.stderr.strip() or "no message").replace(folder + "/", "")
            raise SchemaError(
                f"the .proto file cannot be compiled: {said}", hint="correct the file, or add what it imports"
            )
        return Path(folder, "set").read_bytes()


def _write(folder: Path, name: str, schema: WireSchema) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise SchemaError(f"the schema imports {name!r}, which is no path below it", hint="import by a relative path")
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(schema.text, encoding="utf-8")
    for reference, imported in schema.references:
        if not (folder / reference).exists():
            _write(folder, reference, imported)


def message_names(data: bytes) -> dict[tuple[int, ...], str]:
    """The full names of a schema's own messages by their paths: (0,) is the first, (0, 1) the second within it."""
    main = descriptor_pb2.FileDescriptorSet.FromString(data).file[-1]
    return dict(_paths(main.message_type, (), main.package))


def _paths(messages: Sequence[Any], path: tuple[int, ...], scope: str) -> Iterator[tuple[tuple[int, ...], str]]:
    for place, message in enumerate(messages):
        name = f"{scope}.{message.name}" if scope else message.name
        yield (*path, place), name
        yield from _paths(message.nested_type, (*path, place), name)


def pool_of(files: descriptor_pb2.FileDescriptorSet) -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    try:
        for each in files.file:
            pool.Add(each)
            pool.FindFileByName(each.name)
    except (TypeError, KeyError) as error:
        raise SchemaError(
            f"the descriptor set does not hold together: {error}", hint="write it with protoc --include_imports"
        ) from error
    return pool
