"""Which versions of Spark serve, and what the older ones of them lack."""

from __future__ import annotations

import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pyarrow as pa

from penstock.errors import ConfigError

OLDEST, BEFORE = (4, 0), (5, 0)
"""`pyspark>=4.0,<5`."""

_CODE = "PEN-1050"


def spark_version() -> tuple[int, int]:
    """Major and minor version of the installed pyspark; refuses one that does not serve."""
    hint = "pip install 'pyspark>=4.0,<5'"
    try:
        found = version("pyspark")
    except PackageNotFoundError:
        raise ConfigError("pyspark is not installed", code=_CODE, hint=hint) from None
    major, minor = (int(part) for part in found.split(".")[:2])
    if not OLDEST <= (major, minor) < BEFORE:
        raise ConfigError(f"pyspark is {found}, and Penstock runs on Spark 4", code=_CODE, hint=hint)
    return major, minor


def check_spark() -> str:
    """What `penstock check` says of the installed pyspark, and what that version lacks; refuses one that does not serve."""
    spark_version()
    lacks = missing_features()
    return f"pyspark {version('pyspark')}" + (f", which lacks {'; '.join(lacks)}" if lacks else "")


def missing_features() -> list[str]:
    """What a newer Spark 4 has and this one does not; pipelines run without it."""
    lacks = []
    if not has_read_limits():
        lacks.append('limits, availableNow and lag for readStream.format("penstock")')
    return lacks


def has_read_limits() -> bool:
    """True if streams of Python data sources are asked for an end by start and limit."""
    from pyspark.sql import datasource

    return hasattr(datasource.DataSourceStreamReader, "getDefaultReadLimit")


def arrow_schema(schema: Any) -> pa.Schema:
    """The Arrow types of a DataFrame's columns, its times in UTC whichever version this is."""
    from pyspark.sql.pandas.types import to_arrow_schema

    zone = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(schema, **zone)
