"""Read files as they land in a directory: JSON lines, CSV and Parquet, each file once."""

from penstock.connectors.files_source.source import Files, FilesConfig, Inventoried

__all__ = ["Files", "FilesConfig", "Inventoried"]
