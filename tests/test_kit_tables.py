"""The kit's laws for table sources: one that keeps them all, and for each law one that breaks it and is caught."""

from __future__ import annotations

import itertools

import pytest

from penstock.testing import MemoryDatabase, MemoryTables, MemoryTablesConfig, TableSourceContract

TABLES = ("shop.items", "shop.orders")


def fill(path):
    database = MemoryDatabase(path)
    for id, table in itertools.product(range(1, 9), TABLES):
        database.put(table, id, f"{table} {id}")
    return database


class TestMemoryTables(TableSourceContract):
    @pytest.fixture
    def database(self, tmp_path):
        return fill(tmp_path)

    @pytest.fixture
    def source(self, database, tmp_path):
        return MemoryTables(MemoryTablesConfig(path=tmp_path))

    @pytest.fixture
    def change(self, database):
        numbers = itertools.count(100)

        def happen(stream):
            number = next(numbers)
            database.put(stream, number, "new")
            database.put(stream, number % 5 + 1, f"changed {number}")
            database.delete(stream, number % 3 + 6)

        return happen

    @pytest.fixture
    def content(self, database):
        return database.content
