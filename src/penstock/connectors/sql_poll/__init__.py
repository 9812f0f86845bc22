"""Capture changed rows by asking SQL tables for them again and again, by a cursor such as `updated_at`."""

from penstock.connectors.sql_poll.source import SqlPoll, SqlPollConfig

__all__ = ["SqlPoll", "SqlPollConfig"]
