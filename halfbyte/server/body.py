"""The body of a request: read as far as the limits go, within time, and parsed strictly."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from .. import strict_json
from ..errors import CheckpointError
from .refusals import Refused
from .settings import Settings

LARGE = 1 << 16  # bytes: from here on parsing is worth a thread
PART = 64_000  # bytes of a body that buy their sender more time


async def read(request: Request, settings: Settings) -> bytes:
    """All of the body, or a refusal once it is longer or later than it may be, whatever its headers said."""
    said = request.headers.get("content-length", "0")
    if not said.isdecimal() or int(said) > settings.body_bytes:
        raise too_large(settings)
    data = bytearray()
    stream, begun = request.stream(), asyncio.get_running_loop().time()
    try:
        while True:
            async with asyncio.timeout_at(begun + settings.header_seconds * (1 + len(data) // PART)):
                part = await anext(stream, None)
            if part is None:
                return bytes(data)
            data += part
            if len(data) > settings.body_bytes:
                raise too_large(settings)
    except TimeoutError:
        raise Refused(408, "The request was not sent in time.", code="timeout") from None
    except ClientDisconnect:
        raise Refused(499, "The client has gone.") from None


def too_large(settings: Settings) -> Refused:
    return Refused(413, f"A request may have {settings.max_body_mb:g} MB.", code="request_too_large")


async def read_json(request: Request, settings: Settings) -> Any:
    data = await read(request, settings)
    return parse(data, settings) if len(data) < LARGE else await asyncio.to_thread(parse, data, settings)


def parse(data: bytes, settings: Settings) -> Any:
    try:
        return strict_json.parse(data, "The body", remedy="", depth=settings.max_json_depth, finite=True)
    except CheckpointError as error:
        raise Refused(400, str(error).strip(), code="invalid_json") from None
