"""
Google's storage for tests: a proxy before an S3 server that speaks what clients of GCS speak, its XML API.

    with GcsServer(s3.port) as gcs:
        store.at(gcs.bucket(), gcs.options(key_file))

The two APIs differ in the names of headers: conditions, sources of copies, generations. Signatures are not looked at.
"""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any
from uuid import uuid4

from penstock.testing.spoiler import Spoiler

_TO_S3 = (
    (r"\r\nx-goog-if-generation-match: *0", "\r\nIf-None-Match: *"),
    (r"\r\nx-goog-copy-source:", "\r\nx-amz-copy-source:"),
    (r"\r\nauthorization:[^\r]*", ""),
)


class GcsServer(Spoiler):
    """It spoils answers as well, if it is asked to."""

    def options(self, key_file: Path, **more: Any) -> dict[str, Any]:
        """`storage_options` for this server; the file gets a service account that asks nobody for tokens."""
        account = {"gcs_base_url": self.endpoint, "disable_oauth": True, "client_email": "", "private_key": ""}
        key_file.write_text(json.dumps({**account, "private_key_id": ""}))
        return {"service_account": str(key_file), "allow_http": True, **more}

    def bucket(self, name: str = "") -> str:
        """Make a bucket, by default with a name of its own; gives its address."""
        name = name or f"g-{uuid4().hex[:12]}"
        request = urllib.request.Request(f"http://127.0.0.1:{self.upstream}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=30):
            return f"gs://{name}"

    async def _forward(self, method: str, head: str, body: bytes) -> bytes:
        for ours, theirs in _TO_S3:
            head = re.sub(ours, theirs, head, flags=re.IGNORECASE)
        if method == "DELETE":  # S3 does not say whether there was something, GCS does
            found = await super()._forward("HEAD", head.replace("DELETE", "HEAD", 1), b"")
            if found.startswith(b"HTTP/1.1 404"):
                return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        answer = await super()._forward(method, head, body)
        status, found, rest = answer.partition(b"\r\n")
        return status + found + b"x-goog-generation: 1\r\n" + rest
