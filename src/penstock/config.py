"""What every connector's options are made of: strict classes, secrets by reference, units in names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from penstock.errors import ConfigError


class Config(BaseModel):
    """Options of one connector. Unknown keys are refused; a docstring under each field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Secret(BaseModel):
    """
    A reference to a secret: `{ env = "NAME" }` or `{ file = "path" }`.

    Only the reference travels and prints; `reveal()` reads the value where it is used.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    env: str | None = None
    """Name of the environment variable that holds the secret."""

    file: Path | None = None
    """File that holds the secret; a trailing newline is dropped."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_plain_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError('a secret is a reference: { env = "NAME" } or { file = "path" }, never the text itself')
        return value

    @model_validator(mode="after")
    def _one_way(self) -> Secret:
        if (self.env is None) == (self.file is None):
            raise ValueError('a secret is either { env = "NAME" } or { file = "path" }')
        return self

    def reveal(self) -> str:
        """The secret's text; called where it is used, and kept nowhere."""
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
