"""Changes of rows: the columns that describe them, the keys that they are about, and what an epoch of them comes to."""

from penstock.changes.columns import CHANGE_FIELDS, Op, is_changelog, own_columns

__all__ = ["CHANGE_FIELDS", "Op", "is_changelog", "own_columns"]
