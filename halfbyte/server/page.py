"""The page at /: one file, and the policy that lets a browser run what stands in it and nothing else."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.S)


def policy(text: str) -> str:
    """Its own script and style, by their hashes; requests to its own server; and no text may ever become HTML."""
    allowed: dict[str, list[str]] = {"script": [], "style": []}
    for kind, inside in INLINE.findall(text):
        allowed[kind].append(f"'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'")
    directives = [
        "default-src 'none'", f"script-src {' '.join(allowed['script'])}", f"style-src {' '.join(allowed['style'])}",
        "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        "require-trusted-types-for 'script'", "trusted-types 'none'",
    ]  # fmt: skip
    return "; ".join(directives)


class Page:
    def __init__(self) -> None:
        self.text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        self.headers = {
            "Content-Security-Policy": policy(self.text),
            "Cache-Control": "no-cache",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }

    async def answer(self, request: Request) -> Response:
        return Response(self.text, media_type="text/html", headers=self.headers)
