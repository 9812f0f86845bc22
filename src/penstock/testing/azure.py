"""
Azure's blob storage for tests: its emulator, Azurite, on a free port of 127.0.0.1.

`python -m penstock.testing.azure` installs it once into the user's cache, by npm (360 MB).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from email.utils import formatdate
from pathlib import Path
from typing import Any
from uuid import uuid4

from penstock.testing.s3 import S3Server, cache

AZURITE = "3.37.0"

ACCOUNT, KEY = "penstocktests", base64.b64encode(b"not-a-secret").decode()


def home() -> Path:
    return cache() / f"azurite-{AZURITE}"


def is_installed() -> bool:
    return home().is_dir() and shutil.which("node") is not None


def install() -> None:
    """Fetch it, unless it is there; a call that is broken off leaves nothing that looks installed."""
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("npm is missing: it fetches Azurite")
    if home().is_dir():
        return
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache()) as temporary:
        quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--silent"]
        subprocess.run([npm, "install", *quiet, "--prefix", temporary, f"azurite@{AZURITE}"], check=True, cwd=temporary)
        Path(temporary).rename(home())
        Path(temporary).mkdir()  # for the end of the block


class AzureServer(S3Server):
    """Azurite over a directory. It refuses requests whose signature is not by the right key, and honours conditions."""

    name = "Azurite"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"

    def options(self, **more: Any) -> dict[str, Any]:
        """`storage_options` for this server. The key is in the environment, as `PENSTOCK_AZURE_KEY`."""
        os.environ["PENSTOCK_AZURE_KEY"] = KEY
        key = {"env": "PENSTOCK_AZURE_KEY"}
        return {"endpoint": self.endpoint, "account_name": ACCOUNT, "account_key": key, **more}

    def bucket(self, name: str = "") -> str:
        return super().bucket(name or f"c-{uuid4().hex[:12]}").replace("s3://", "az://")

    def _command(self) -> list[str]:
        node = shutil.which("node")
        assert node is not None, "Node is missing"
        script = home() / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
        place = ["--location", str(self._home / "data"), "--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        return [node, str(script), *place, "--skipApiVersionCheck", "--silent", "--disableTelemetry"]

    def _environment(self) -> dict[str, str]:
        return {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}

    def _make_bucket(self, name: str) -> None:
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
        named = "\n".join(f"{each}:{value}" for each, value in headers.items())
        # The method, eleven headers that are empty, those of Azure, and what is asked for; the emulator repeats the account.
        text = "PUT" + "\n" * 12 + f"{named}\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        signed = hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}"
        where = f"{self.endpoint}/{name}?restype=container"
        with urllib.request.urlopen(urllib.request.Request(where, method="PUT", headers=headers), timeout=30):
            pass


if __name__ == "__main__":
    if "--is-installed" in sys.argv:
        sys.exit(not is_installed())
    try:
        install()
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(f"Azurite, which tests of Azure need, cannot be fetched: {error}")
