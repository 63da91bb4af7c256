"""Who may come in: the checks that every request passes before any route sees it.

They decide on scope["path"] and on headers alone, never on a URL that was put together from the Host header.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .refusals import Refused
from .settings import Settings

OPEN = ("/", "/health")  # without a key: the page asks for it, and watchers have none


def digest(key: str | bytes) -> bytes:
    return hashlib.sha256(key if isinstance(key, bytes) else key.encode()).digest()


class Gate:
    """`hosts`: names that the server goes by, beside addresses and localhost; "*" is any. `origins` as in CORS."""

    def __init__(
        self, app: ASGIApp, settings: Settings, keys: Iterable[str], hosts: Iterable[str], origins: Iterable[str]
    ) -> None:
        self.app, self.settings = app, settings
        self.keys = [digest(key) for key in keys]
        self.hosts, self.origins = frozenset(host.lower() for host in hosts), frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            scope["owner"] = self._admitted(scope)
        except Refused as refused:
            await refused.response(scope["path"])(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _admitted(self, scope: Scope) -> bytes:
        """Whose request it is, by the digest of its key."""
        if len(scope["headers"]) > self.settings.max_headers:
            raise Refused(431, f"A request may have {self.settings.max_headers} header lines.", code="too_many_headers")
        headers = Headers(scope=scope)
        if not self._known(headers.get("host", "")):
            raise Refused(
                403, "The server does not go by this Host; --allowed-hosts lists its names.", code="host_refused"
            )
        origin = headers.get("origin")
        if origin is not None and not self._own(origin, headers.get("host", "")):
            raise Refused(403, "This origin is not listed in --cors-origins.", code="origin_refused")
        return self._owner(scope, headers)

    def _owner(self, scope: Scope, headers: Headers) -> bytes:
        if not self.keys:
            return b""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        mine = digest(given.encode("latin-1"))
        # Every key is compared, each in constant time: neither how much of one is right shows, nor which one it is.
        found = [key for key in self.keys if hmac.compare_digest(key, mine)]
        if not found and scope["path"] not in OPEN:
            raise Refused(401, "A valid API key is needed: Authorization: Bearer KEY.", code="invalid_api_key")
        return mine if found else b""

    def _known(self, host: str) -> bool:
        """An address, localhost, or a listed name. Another name may be a stranger's that was pointed at us."""
        name = hostname(host)
        if "*" in self.hosts or name in self.hosts or name == "localhost":
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def _own(self, origin: str, host: str) -> bool:
        return "*" in self.origins or origin in self.origins or origin.partition("://")[2] == host


def hostname(host: str) -> str:
    """Without its port."""
    name, _, port = host.rpartition(":")
    return (name if port.isdecimal() and name else host).lower()
