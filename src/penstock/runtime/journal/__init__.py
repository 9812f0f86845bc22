"""Durable segments that make a source which cannot be read again into one that can."""

from penstock.runtime.journal.envelopes import size_of
from penstock.runtime.journal.source import UNSEEN, JournalConfig, JournalPosition, JournalSource, JournalSplit
from penstock.runtime.journal.writer import Full, Item, Journal

__all__ = [
    "UNSEEN",
    "Full",
    "Item",
    "Journal",
    "JournalConfig",
    "JournalPosition",
    "JournalSource",
    "JournalSplit",
    "size_of",
]
