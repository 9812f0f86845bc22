"""What tests of registries share."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory, need) -> Path:
    """A certificate authority, and certificates of a server and of a client."""
    need(shutil.which("openssl"), "openssl is not installed")
    path = tmp_path_factory.mktemp("keys")

    def run(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=path, check=True, capture_output=True)

    run("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca",
        "-days", "2")  # fmt: skip
    for name in ("server", "client"):
        run("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj",
            f"/CN={name}")  # fmt: skip
        (path / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        run("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out",
            f"{name}.pem", "-days", "2", "-extfile", "names")  # fmt: skip
    run("rsa", "-aes128", "-passout", "pass:key-word", "-in", "client.key", "-out", "locked.key")
    return path
