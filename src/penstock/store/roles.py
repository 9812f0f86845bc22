"""Roles of AWS: keys for a while, for which its service of tokens takes the keys that somebody has."""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote, urlencode, urlparse
from xml.etree import ElementTree

from penstock.errors import ConfigError, ConnectorError, FatalError, RetryableError

EARLY_SECS = 300.0
"""Keys are asked for again this much before they end."""

_KEYS = {"AccessKeyId": "access_key_id", "SecretAccessKey": "secret_access_key", "SessionToken": "session_token"}

_lock = threading.Lock()
_held: dict[tuple[str, ...], tuple[float, dict[str, str]]] = {}
"""Keys of this process, and when they are to be asked for again; by role, endpoint and whose keys asked."""


def assumed(role: str, options: Mapping[str, str], endpoint: str = "") -> dict[str, str]:
    """The keys of a role as storage options; `options` hold the keys and the region by which it is asked for."""
    if not {"access_key_id", "secret_access_key"} <= options.keys():
        raise ConfigError(
            "`role_arn` needs keys that may assume the role",
            code="PEN-1004",
            hint="give access_key_id and secret_access_key, or a `profile` that has them",
        )
    region = options.get("region", "us-east-1")
    where = endpoint or f"https://sts.{region}.amazonaws.com"
    whose = (role, where, *(options.get(name, "") for name in _KEYS.values()))
    with _lock:
        until, keys = _held.get(whose, (0.0, {}))
        if time.time() >= until:
            until, keys = _asked(role, options, region, where)
            _held[whose] = (until, keys)
        return dict(keys)


def forget(keys: Mapping[str, str]) -> None:
    """The store has refused these keys: ask for others next time."""
    with _lock:
        for whose, (_, held) in list(_held.items()):
            if held["access_key_id"] == keys.get("access_key_id"):
                del _held[whose]


def _asked(role: str, options: Mapping[str, str], region: str, where: str) -> tuple[float, dict[str, str]]:
    asked = {"Action": "AssumeRole", "Version": "2011-06-15", "RoleArn": role, "RoleSessionName": "penstock"}
    body = urlencode(asked, quote_via=quote).encode()
    request = urllib.request.Request(where, body, _signed(options, region, where, body), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise _refused(role, error.code, error.read().decode(errors="replace")) from None
    except OSError as error:
        raise RetryableError(f"{where} cannot be asked for the role {role}: {error}", code="PEN-2001") from error
    found = {each.tag.rpartition("}")[2]: each.text or "" for each in ElementTree.fromstring(text).iter()}
    ends = datetime.fromisoformat(found["Expiration"].replace("Z", "+00:00")).timestamp()
    # Of keys that are given for a short time, a share: a clock that is wrong must not lead to a request for every object.
    until = max(ends - EARLY_SECS, time.time() + 0.5 * (ends - time.time()))
    return until, {ours: found[theirs] for theirs, ours in _KEYS.items()}


def _refused(role: str, status: int, text: str) -> ConnectorError:
    said = re.search(r"<Code>([^<]*)</Code>", text)
    reason = f"{status} {said[1]}" if said else str(status)
    if status >= 500 or status == 429 or (said and said[1] in ("ExpiredToken", "ExpiredTokenException", "Throttling")):
        return RetryableError(f"the role {role} cannot be assumed now: {reason}", code="PEN-2001")
    return FatalError(
        f"the role {role} cannot be assumed: {reason}",
        code="PEN-5050",
        hint="check `role_arn`, and that the role trusts who asks: the owner of the keys or of the profile",
    )


def _signed(options: Mapping[str, str], region: str, where: str, body: bytes) -> dict[str, str]:
    """The headers of a request, signed as AWS wants it (version 4)."""
    now, host = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"), urlparse(where).netloc
    headers = {"content-type": "application/x-www-form-urlencoded", "host": host, "x-amz-date": now}
    if token := options.get("session_token"):
        headers["x-amz-security-token"] = token
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    digest = hashlib.sha256(body).hexdigest()
    request = f"POST\n{urlparse(where).path or '/'}\n\n{lines}\n{names}\n{digest}"
    scope = f"{now[:8]}/{region}/sts/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = b"AWS4" + options["secret_access_key"].encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), hashlib.sha256)
    signature = hmac.digest(key, text.encode(), hashlib.sha256).hex()
    by = f"Credential={options['access_key_id']}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**headers, "Authorization": f"AWS4-HMAC-SHA256 {by}"}
