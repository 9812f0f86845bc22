"""Read files of JSON lines that land in a directory under growing names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.json
from pydantic import PositiveInt

from penstock.config import Config
from penstock.errors import ConfigError, DataError, FatalError, reason_of
from penstock.source import Position, RangeSource, ReadLimit, Schemas, SourceBatch, SourceContext


class JsonlDirConfig(Config):
    path: Path
    """Directory to watch. A file is moved there whole, and its name sorts after all earlier ones."""

    columns: dict[str, str]
    """Arrow type of each column, e.g. `{ id = "int64", note = "string" }`."""

    max_files_per_epoch: PositiveInt = 100
    """How many files one epoch reads at most."""


class LastFile(Position):
    """The name of the last file that was read; a range begins after the start and includes the end."""

    file: str = ""


class JsonlDir(RangeSource[JsonlDirConfig, LastFile]):
    """
    Each file is one split; its name is the position.

    Supports exactly-once: a file never changes, so a range of names always holds the same rows.
    """

    name = "jsonl_dir"

    def open(self, context: SourceContext = SourceContext()) -> None:
        if not self.config.path.is_dir():
            raise ConfigError(f"{self.config.path} is not a directory", code="PEN-1016", hint="make it, or fix `path`")

    def schema(self) -> Schemas:
        return {"lines": pa.schema([(name, pa.type_for_alias(kind)) for name, kind in self.config.columns.items()])}

    def latest(self, start: LastFile, limit: ReadLimit) -> LastFile:
        waiting = self._files_after(start)
        if limit.rows is not None:  # None asks for all there is, and gets it
            waiting = waiting[: self.config.max_files_per_epoch]
        return limit.bounded(LastFile(file=waiting[-1])) if waiting else start

    def split(self, start: LastFile, end: LastFile) -> Sequence[str]:
        return [name for name in self._files_after(start) if name <= end.file]

    def read(self, split: str) -> Iterator[SourceBatch]:
        file = self.config.path / split
        wanted = pyarrow.json.ParseOptions(explicit_schema=self.schema()["lines"], unexpected_field_behavior="ignore")
        try:
            table = pyarrow.json.read_json(file, parse_options=wanted) if file.stat().st_size else pa.table({})
        except FileNotFoundError as error:
            raise FatalError(f"{file} is gone", code="PEN-5011", hint="put it back") from error
        except pa.ArrowInvalid as error:
            raise DataError(f"{file} does not fit these columns: {reason_of(error)}", code="PEN-3001") from error
        yield from (SourceBatch(batch, stream="lines") for batch in table.to_batches())

    def _files_after(self, position: LastFile) -> list[str]:
        return sorted(file.name for file in self.config.path.glob("*.jsonl") if file.name > position.file)
