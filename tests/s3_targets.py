"""Targets of the crash suite in a store: which one it is, other processes find in a file beside the test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock import store
from penstock.config import Config
from penstock.testing import azure
from penstock.testing.gcs import GcsServer
from penstock.testing.s3 import KEY, SECRET, S3Server


class _Options(Config):
    storage_options: store.StorageOptions


def note(tmp_path: Path, server: S3Server, **more: Any) -> None:
    """Write the server down for all processes of a test."""
    write(tmp_path, server.bucket(), server.options(**more))


def write(tmp_path: Path, bucket: str, options: dict[str, Any]) -> None:
    (tmp_path / "s3.json").write_text(json.dumps({"bucket": bucket, "options": options}))


def at(path: Path) -> tuple[str, dict[str, Any]]:
    """The address that a path of the test has in the server, and the options to reach it."""
    above = next(each for each in (path, *path.parents) if (each / "s3.json").exists())
    found = json.loads((above / "s3.json").read_text())
    os.environ["PENSTOCK_S3_KEY"], os.environ["PENSTOCK_S3_SECRET"] = KEY, SECRET
    os.environ["PENSTOCK_AZURE_KEY"] = azure.KEY
    below = path.relative_to(above).as_posix()
    return f"{found['bucket']}/{below}".removesuffix("/."), found["options"]


def place(path: Path) -> store.Place:
    where, options = at(path)
    return store.at(where, _Options(storage_options=options).storage_options)


def delete_staged(path: Path, live: set[str]) -> None:
    """Delete the files of the second epoch that no reader sees."""
    found = [entry.place for entry in store.listed(place(path))]
    lost = [
        each
        for each in found
        if each.name.startswith("000000000002-")
        and not each.name.endswith(".json")
        and "/." not in str(each)
        and each.name.removesuffix(".staged") not in live
    ]
    assert lost, f"no staged file of epoch 2 below {path}"
    store.delete(lost)


class InS3:
    """A contract whose targets are in the server of the fixture `s3`."""

    zygote = True

    @pytest.fixture(autouse=True)
    def _in_s3(self, tmp_path: Path, s3: S3Server) -> None:
        note(tmp_path, s3)

    def empty(self, path: Path) -> None:
        store.delete(entry.place for entry in store.listed(place(path)))


class InGcs(InS3):
    """The same, in the server of the fixture `gcs`."""

    @pytest.fixture(autouse=True)
    def _in_s3(self, tmp_path: Path, gcs: GcsServer) -> None:
        write(tmp_path, gcs.bucket(), gcs.options(tmp_path / "account.json"))


class InAzure(InS3):
    """The same, in the server of the fixture `azure`."""

    @pytest.fixture(autouse=True)
    def _in_s3(self, tmp_path: Path, azure: azure.AzureServer) -> None:
        note(tmp_path, azure)
