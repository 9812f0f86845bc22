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

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError

from penstock.errors import SchemaError
from penstock.formats import WireSchema

COMPILE_SECS = 60

_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+=*\s*\Z")
_MAIN = "schema.proto"


@lru_cache(maxsize=64)
def compiled(schema: WireSchema) -> bytes:
    """The schema as a descriptor set; its last file is the schema itself, those before it are what it imports."""
    if not _is_binary(schema):
        return _compile(schema)
    try:
        data = base64.b64decode(schema.text, validate=False)
        alone = FileDescriptorProto.FromString(data)
        if _is_name(alone.name):
            return bytes(_with_imports(alone, schema).SerializeToString())
        if not FileDescriptorSet.FromString(data).file:
            raise SchemaError("the descriptor set holds no file", hint="write it with protoc --descriptor_set_out")
    except (binascii.Error, DecodeError) as error:
        raise SchemaError(
            f"neither a .proto file nor a descriptor set in base64: {error}",
            hint="write the set with protoc --include_imports --descriptor_set_out, and base64",
        ) from error
    return data


def _is_name(found: str | bytes) -> bool:
    """True: of one file. In the place of its name a set has the bytes of a file, and they begin with a line feed."""
    return isinstance(found, str) and bool(found) and found.isprintable()


def _is_binary(schema: WireSchema) -> bool:
    return bool(_BASE64.match(schema.text))


def _with_imports(main: FileDescriptorProto, schema: WireSchema) -> FileDescriptorSet:
    """One file's descriptor, as some clients register it, after the files that its references and Protobuf itself hold."""
    files: dict[str, FileDescriptorProto] = {}
    for name, reference in schema.references:
        *imported, own = FileDescriptorSet.FromString(compiled(reference)).file
        own.name = name
        files |= {each.name: each for each in (*imported, own) if each.name not in files}
    for name in main.dependency:
        if name not in files:
            files |= {each.name: each for each in _of_protobuf(name) if each.name not in files}
    return FileDescriptorSet(file=[*files.values(), main])


def _of_protobuf(name: str) -> Sequence[FileDescriptorProto]:
    """A file that comes with Protobuf, after what it imports itself."""
    text = f'syntax = "proto3";\nimport "{name}";\n'
    return list(FileDescriptorSet.FromString(compiled(WireSchema("protobuf", text))).file[:-1])


def as_text(data: bytes) -> str:
    """A descriptor set as a schema's text."""
    return base64.b64encode(data).decode()


def text_of_one_file(schema: WireSchema) -> str:
    """The text that a registry takes which keeps each file as a schema: of a set, its one file without what Protobuf brings."""
    if not _is_binary(schema):
        return schema.text
    files = FileDescriptorSet.FromString(compiled(schema)).file
    imported = {name for name, _ in schema.references}
    others = [
        each.name for each in files[:-1] if not each.name.startswith("google/protobuf/") and each.name not in imported
    ]
    if others:
        raise SchemaError(
            f"the descriptor set has more than one file ({', '.join(others[:3])}), and the registry keeps one file a schema",
            hint="join them in one .proto file, or use the embedded registry",
        )
    return as_text(files[-1].SerializeToString())


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
    main = FileDescriptorSet.FromString(data).file[-1]
    return dict(_paths(main.message_type, (), main.package))


def _paths(messages: Sequence[Any], path: tuple[int, ...], scope: str) -> Iterator[tuple[tuple[int, ...], str]]:
    for place, message in enumerate(messages):
        name = f"{scope}.{message.name}" if scope else message.name
        yield (*path, place), name
        yield from _paths(message.nested_type, (*path, place), name)


def pool_of(files: FileDescriptorSet) -> descriptor_pool.DescriptorPool:
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
