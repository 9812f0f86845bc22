"""How the files of a source become splits: what they are called, what format and columns they have, where they are cut."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.connectors.files import readers
from penstock.connectors.files.inventory import Found
from penstock.connectors.files.splits import FileSplit, format_of
from penstock.connectors.files.types import merge, widest, widest_text
from penstock.errors import ConfigError, DataError, RangeGone
from penstock.schema.typenames import arrow_type
from penstock.source import SourceRecord
from penstock.store import Place

if TYPE_CHECKING:
    from penstock.connectors.files.source import FilesConfig


class Layout:
    """What the options say of a file, given its name."""

    def __init__(self, config: FilesConfig, base: Place) -> None:
        self._config = config
        self._base = base

    def stream(self, file: Found) -> str:
        if "{" not in self._config.stream:
            return self._config.stream
        path = self._base / file.file
        return self._config.stream.format(parent=path.parent.name, stem=path.name.partition(".")[0])

    def explicit(self) -> pa.Schema | None:
        columns = self._config.columns
        return None if columns is None else pa.schema([(name, arrow_type(text)) for name, text in columns.items()])

    def each_stream(self, columns: pa.Schema, files: Sequence[Found]) -> dict[str, pa.Schema]:
        one = "{" not in self._config.stream
        return {self._config.stream: columns} if one else {self.stream(file): columns for file in files}

    def split(self, file: Found, schemas: Mapping[str, pa.Schema]) -> FileSplit:
        stream = self.stream(file)
        format = self._config.format or format_of(file.file)
        if format is None:
            raise ConfigError(
                f"the ending of {file.file} tells no format",
                code="PEN-1016",
                hint="set `format`, or name the file in `ignore`",
            )
        return FileSplit(
            path=os.path.join(str(self._base), file.file),
            size=file.size,
            mtime_ns=file.mtime_ns,
            etag=file.etag,
            options=tuple(sorted(self._config.storage_options.items())),
            format=format,
            stream=stream,
            schema=schemas.get(stream, self.explicit()),
            explicit=self._config.columns is not None,
            delimiter=self._config.delimiter,
            header=self._config.header,
        )

    def pieces(self, whole: FileSplit) -> Iterable[FileSplit]:
        """A large file in parts of about `split_bytes`; they depend on nothing but the file."""
        most = self._config.split_bytes
        if whole.size <= most or whole.compression or whole.format == "csv":
            return [whole]
        if whole.format == "parquet":
            edges = _runs(readers.row_groups(whole), most)
        else:
            count = -(-whole.size // most)
            edges = [whole.size * each // count for each in range(count + 1)]
        return [replace(whole, start=lo, end=hi) for lo, hi in pairwise(edges)] or [whole]

    def samples(self, files: Sequence[Found], count: int) -> list[SourceRecord]:
        samples = []
        for file in files[:: max(1, -(-len(files) // max(1, count)))]:
            try:
                head = readers.head(self.split(file, {}))
            except (DataError, RangeGone, pa.ArrowInvalid):
                continue  # the task that reads the file says what is wrong with it
            samples.append(SourceRecord(self.stream(file), head, attributes={"file": file.file}))
        return samples

    def infer(self, samples: Sequence[SourceRecord]) -> dict[str, pa.Schema]:
        """The schemas of files whose heads these are."""
        schemas: dict[str, pa.Schema] = {}
        for sample in samples:
            split = self.split(Found(0, sample.attributes["file"], 0), {})
            found = readers.infer(split, sample.payload or b"")
            if found is not None:
                widen = widest_text if split.format == "csv" else widest
                schemas[sample.stream] = merge(schemas.get(sample.stream), found, widen=widen)
        return schemas


def _runs(sizes: Sequence[int], most: int) -> list[int]:
    """Edges of runs of neighbours that are at most `most` together, or single."""
    edges, filled = [0], 0
    for at, size in enumerate(sizes):
        if filled and filled + size > most:
            edges.append(at)
            filled = 0
        filled += size
    return [*edges, len(sizes)] if sizes else []
