"""The options that the source and the sink have in common."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from penstock.config import Config, Secret
from penstock.errors import ConfigError

PORTS = {"mqtt": 1883, "mqtts": 8883}


class BrokerConfig(Config):
    url: str
    """Where the broker is: `mqtt://host:1883`, or `mqtts://host:8883` with TLS. The port may be left out."""

    version: Literal["3.1.1", "5"] = "5"
    """The version of MQTT to speak. User properties need 5."""

    username: str | None = None
    """The user to connect as."""

    password: Secret | None = None
    """The user's password."""

    ca_file: Path | None = None
    """Certificates (PEM) that sign the broker's, with `mqtts://`; without it those of the machine count."""

    cert_file: Path | None = None
    """Certificate (PEM) to show to a broker that asks for one; with `key_file`."""

    key_file: Path | None = None
    """Private key (PEM) of `cert_file`."""

    keepalive_secs: PositiveInt = 30
    """A broker that was silent for this long is asked if it is there; if it stays silent, the connection is given up."""

    timeout_secs: PositiveFloat = 20
    """Longest wait for an answer of the broker."""

    max_inflight: Annotated[PositiveInt, Field(le=65_535)] = 100
    """Messages that may wait for an acknowledgement at a time. With 3.1.1 the broker decides how many a source gets."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in PORTS or not parts.hostname or parts.path.strip("/"):
            raise ValueError("write mqtt://host:port, or mqtts://host:port for TLS")
        if parts.username or parts.password:
            raise ValueError("the user belongs into `username`, and a secret into `password`")
        return url

    @property
    def host(self) -> str:
        return str(urlsplit(self.url).hostname)

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or PORTS[parts.scheme]

    def tls(self) -> ssl.SSLContext | None:
        """What the connection is wrapped in; None: `mqtt://`, plain text."""
        files = {name: getattr(self, name) for name in ("ca_file", "cert_file", "key_file")}
        if urlsplit(self.url).scheme == "mqtt":
            given = [name for name, value in files.items() if value is not None]
            if given:
                raise ConfigError(
                    f"`{given[0]}` is for TLS, and {self.url} says plain text", code="PEN-1003", hint="write mqtts://"
                )
            return None
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("`cert_file` and `key_file` belong together", code="PEN-1003", hint="set both, or none")
        try:
            context = ssl.create_default_context(cafile=self.ca_file)  # it checks the broker's name as well
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            named = ", ".join(str(value) for value in files.values() if value is not None)
            raise ConfigError(
                f"the certificates cannot be used ({named}): {error.strerror or error}",
                code="PEN-1003",
                hint="they are PEM files, and the key is that of the certificate",
            ) from error
        return context
