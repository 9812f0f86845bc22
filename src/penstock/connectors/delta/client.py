"""How the Delta client reaches a table, and what its errors mean."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from deltalake.exceptions import CommitFailedError, DeltaError, DeltaProtocolError, TableNotFoundError

from penstock.errors import FatalError, SchemaError
from penstock.store import Place
from penstock.store.options import for_delta

_OF_A_STORE = re.compile("Generic (S3|GCS|MicrosoftAzure) error|HTTP error|error sending request|status code")
"""How the client says that the store failed."""


def client_options(path: Place) -> dict[str, str] | None:
    """`storage_options` as the Delta client takes them, secrets revealed."""
    return None if isinstance(path, Path) else for_delta(path.store.url, path.store.options)


@contextlib.contextmanager
def store_errors(path: Place) -> Iterator[None]:
    """What a table or its store refuses to the client, as ours; a commit among it may have been made all the same."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except DeltaProtocolError as error:
        raise unknown_feature(path, error) from error
    except OSError as error:
        if isinstance(path, Path):
            raise
        raise path.store.failed(path, error) from error


@contextlib.contextmanager
def delta_errors(path: Place) -> Iterator[None]:
    try:
        yield
    except (TableNotFoundError, CommitFailedError):
        raise
    except DeltaProtocolError as error:
        raise unknown_feature(path, error) from error
    except (DeltaError, OSError) as error:
        if not isinstance(path, Path) and _OF_A_STORE.search(str(error)):
            raise path.store.failed(path, error) from error
        if not isinstance(error, DeltaError):
            raise
        raise FatalError(f"the Delta table {path} cannot be read: {error}", code="PEN-5001") from error


def unknown_feature(path: Place, error: DeltaProtocolError) -> SchemaError:
    return SchemaError(
        f"the Delta table {path} uses a feature that this writer does not know: {error}",
        code="PEN-4002",
        hint="write to another table, or drop the feature from it",
    )
