"""Penstock feeds Apache Spark: connectors in, connectors out, and neither a lost nor a doubled row between them."""

__version__ = "0.1.0"
