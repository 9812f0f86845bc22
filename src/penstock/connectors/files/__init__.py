"""Read files as they land in a directory: JSON lines, CSV and Parquet, each file once."""

from penstock.connectors.files.source import Files, FilesConfig, Inventoried

__all__ = ["Files", "FilesConfig", "Inventoried"]
