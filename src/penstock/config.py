"""What every connector's options are made of: strict classes, secrets by reference, units in names, paths beside the file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, model_validator

from penstock.errors import ConfigError, keep_secret


def beside(base: Path | None, path: str) -> str:
    """`path` as seen from the directory `base`; absolute paths and addresses with `://` stay as they are."""
    if "://" in path:
        return path
    expanded = os.path.expanduser(path)
    return str(Path(base, expanded)) if base is not None else expanded


def _beside_file(path: str, info: ValidationInfo) -> str:
    return beside(base_of(info), path)


def _path_beside_file(path: Path, info: ValidationInfo) -> Path:
    return Path(beside(base_of(info), str(path)))


FilePath = Annotated[str, AfterValidator(_beside_file)]
"""
The type of an option that names files and may hold a template (`lake/{topic}`), a glob or an address with `://`.

A relative one is taken from the pipeline file's directory, as an option of type `Path` is; without a file, from the
working directory.
"""


class Config(BaseModel):
    """Options of one connector. Unknown keys are refused; a docstring under each field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True)

    identity: ClassVar[frozenset[str]] = frozenset(
        {"path", "format", "table", "tables", "topic", "topics", "streams", "columns", "seed", "mode", "partition_by"}
    )
    """
    The options that say what is read or written, as against how: a later run may not change them without a reset.

    Of a list, elements may be added; of a table, keys. Names that a class does not have are passed over.
    """

    shared: ClassVar[Mapping[str, str]] = {}
    """Options that the root of the file may give for all sections that leave them out, and the keys that it has for them."""

    @model_validator(mode="after")
    def _resolve_paths(self, info: ValidationInfo) -> Config:
        # Defaults are not validated one by one, so relative ones are found here.
        base = base_of(info)
        for name, field in type(self).model_fields.items() if base else ():
            value = self.__dict__[name]
            if isinstance(value, Path):
                self.__dict__[name] = Path(beside(base, str(value)))
            elif isinstance(value, list | tuple) and any(isinstance(item, Path) for item in value):
                self.__dict__[name] = type(value)(Path(beside(base, str(item))) for item in value)
            elif isinstance(value, str) and any(getattr(mark, "func", None) is _beside_file for mark in field.metadata):
                self.__dict__[name] = beside(base, value)
        return self


class Secret(BaseModel):
    """
    A reference to a secret: `{ env = "NAME" }` or `{ file = "path" }`.

    Only the reference travels and prints; `reveal()` reads the value where it is used.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True)

    env: str | None = None
    """Name of the environment variable that holds the secret."""

    file: Annotated[Path, AfterValidator(_path_beside_file)] | None = None
    """File that holds the secret, relative to the pipeline file; a trailing newline is dropped."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_plain_text(cls, value: Any) -> Any:
        if not isinstance(value, dict | Secret):
            raise ValueError('a secret is a reference: { env = "NAME" } or { file = "path" }, never the text itself')
        return value

    @model_validator(mode="after")
    def _one_way(self) -> Secret:
        if (self.env is None) == (self.file is None):
            raise ValueError('a secret is either { env = "NAME" } or { file = "path" }')
        return self

    def reveal(self) -> str:
        """The secret's text; called where it is used, and kept nowhere but in the list of what no error may show."""
        text = self._read()
        keep_secret(text)
        return text

    def _read(self) -> str:
        if self.env is not None:
            value = os.environ.get(self.env)
            if value is None:
                raise ConfigError(
                    f"the environment variable {self.env} is not set", code="PEN-1005", hint=f"export {self.env}=…"
                )
            return value
        assert self.file is not None
        try:
            return self.file.read_text().rstrip("\n")
        except OSError as error:
            raise ConfigError(f"cannot read the secret file {self.file}: {error.strerror}", code="PEN-1005") from error
        except UnicodeDecodeError:
            raise ConfigError(f"the secret file {self.file} is not UTF-8 text", code="PEN-1005") from None


def type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a value of this type looks like, in words for people."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is FilePath or any(getattr(mark, "func", None) is _beside_file for mark in metadata):
        return "path"
    if origin is Annotated:
        return type_text(arguments[0], (*arguments[1:], *metadata))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(type_text(each, metadata) for each in arguments if each is not type(None)))
    if origin is Literal:
        return " or ".join(f'"{each}"' if isinstance(each, str) else str(each).lower() for each in arguments)
    if origin in (list, tuple, set, frozenset, Sequence):
        return f"list of {type_text(arguments[0])}"
    if origin in (dict, Mapping):
        return f"table of {type_text(arguments[1])}"
    if isinstance(annotation, type):
        if issubclass(annotation, Enum):
            return " or ".join(f'"{each.value}"' for each in annotation)
        if issubclass(annotation, Secret):
            return 'secret: { env = "NAME" } or { file = "path" }'
        if issubclass(annotation, BaseModel):
            return f"table with {', '.join(f'`{name}`' for name in annotation.model_fields)}"
    plain = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}
    return plain.get(annotation, getattr(annotation, "__name__", str(annotation))) + _bounds(metadata)


def _bounds(metadata: Sequence[Any]) -> str:
    words = {"gt": "above", "ge": "from", "lt": "below", "le": "up to"}
    marks = [*metadata, *(each for mark in metadata for each in getattr(mark, "metadata", ()))]
    return "".join(
        f" {words[name]} {getattr(m, name)}" for m in marks for name in words if getattr(m, name, None) is not None
    )


def base_of(info: ValidationInfo) -> Path | None:
    return (info.context or {}).get("base")
