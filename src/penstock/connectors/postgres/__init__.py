"""Write topics to PostgreSQL tables, appended or applied by key, every table of an epoch in one transaction."""

from penstock.connectors.postgres.config import PostgresSinkConfig
from penstock.connectors.postgres.sink import Postgres

__all__ = ["Postgres", "PostgresSinkConfig"]
