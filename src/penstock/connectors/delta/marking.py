"""Find the rows of changed keys, and mark them as deleted in new deletion vectors."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import uuid4

import numpy as np
from pyroaring import BitMap64

from penstock.changes.keys import Ints
from penstock.connectors.delta.entries import Marked
from penstock.connectors.delta.files import TableFile
from penstock.connectors.delta.vectors import Vector, file_of, positions_of, rows_at
from penstock.connectors.lake.index import Index, Wanted
from penstock.connectors.lake.staging import Stage
from penstock.sink import Topic

MARKED_ROWS = 500
"""Files with fewer rows are rewritten together with the new rows: that takes no longer, and leaves fewer files."""


FEW = 100
"""So many rows are looked up in a vector one by one, which takes a tenth of the time that sets take."""


@dataclass(frozen=True)
class Found:
    """Rows of a file that have one of the wanted keys."""

    positions: Ints
    places: Ints
    """For each the place of its key among the wanted ones."""

    def __len__(self) -> int:
        return len(self.positions)


@dataclass
class Dead:
    """The deletion vectors of a table that were read or written: what was written need not be read."""

    known: dict[Vector, BitMap64] = field(default_factory=dict)

    def of(self, index: Index, file: TableFile) -> BitMap64:
        if file.vector is None:
            return BitMap64()
        if file.vector not in self.known:
            self.known[file.vector] = file.vector.rows(lambda name: (index.table / name).read_bytes())
        return self.known[file.vector]

    def keep_only(self, vectors: set[Vector | None]) -> None:
        self.known = {vector: rows for vector, rows in self.known.items() if vector in vectors}


@dataclass
class Marking:
    """The rows of one epoch that are marked as deleted."""

    index: Index
    wanted: Wanted
    dead: Dead = field(default_factory=Dead)
    marks: list[tuple[TableFile, BitMap64]] = field(default_factory=list)
    """Files, and all their deleted rows from now on."""

    def may_mark(self, file: TableFile) -> bool:
        return file.records is not None and file.records > MARKED_ROWS

    def find(self, file: TableFile) -> Found:
        """The rows that have one of the wanted keys and are not deleted yet."""
        positions, places = self.wanted.find(self.index.part(file))
        dead = self.dead.of(self.index, file)
        if len(positions) and len(dead):
            if len(positions) < FEW:
                alive = np.array([each not in dead for each in positions.tolist()])
            else:
                alive = ~np.isin(positions, positions_of(rows_at(positions) & dead))
            positions, places = positions[alive], places[alive]
        return Found(positions, places)

    def mark(self, file: TableFile, found: Found) -> None:
        self.marks.append((file, self.dead.of(self.index, file) | rows_at(found.positions)))

    def write(self, topic: Topic, stage: Stage) -> list[Marked]:
        """Write the new vectors of all files into one file of the stage."""
        name = uuid4()
        data, vectors = file_of(name, [rows for _, rows in self.marks])
        assert vectors[0].file is not None
        stage.put(topic, vectors[0].file, data)
        self.dead.known.update(zip(vectors, (rows for _, rows in self.marks), strict=True))
        return [
            Marked(path=file.path, rows=file.rows, vector=vector)
            for (file, _), vector in zip(self.marks, vectors, strict=True)
        ]
