"""Limits on each connection: the size of uploads, the time that a client may take, and the sites that may use the
server."""

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from starling.timeouts import Seconds

_CLOSE = {"Connection": "close"}
"""The header of answers to uploads that have not been read to the end."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
OPENAI = "/v1/"
"""The prefix of paths that are answered in the format of OpenAI's API."""


@dataclass(frozen=True)
class Limits:
    """Limits on the requests of a client."""

    upload_bytes: int
    audio_seconds: Seconds
    stall: Seconds


def problem(
    path: str, message: str, parameter: str | None = None, code: str | None = None, kind: str = "invalid_request_error"
) -> dict[str, object]:
    """The JSON of an error. Clients of OpenAI's API expect its format, which names the wrong parameter."""
    if not path.startswith(OPENAI):
        return {"error": message}
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code}}


class Guard:
    """Refuses pages of other sites, uploads that are too large, and clients that stall.

    A browser sends the address of the page with each request that another site's page makes. Without this check, any
    page could listen through a server on the same machine.
    """

    def __init__(self, app: ASGIApp, limits: Limits, is_local: bool) -> None:
        self._app = app
        self._limits = limits
        self._is_local = is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, is_http = self._app, scope["type"] == "http"
        if is_http or scope["type"] == "websocket":
            headers = Headers(scope=scope)
            declared = headers.get("content-length", "0")
            if (refusal := self._refusal(headers)) is not None:
                app = JSONResponse(problem(scope["path"], refusal), 403) if is_http else WebSocketClose(1008, refusal)
            elif is_http and declared.isdecimal() and int(declared) > self._limits.upload_bytes:
                app = JSONResponse(problem(scope["path"], self._too_large), 413, _CLOSE)
            else:
                send = self._hurried(send)
                receive = self._counted(receive) if is_http else receive
        await app(scope, receive, send)

    def _refusal(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._is_local and urlsplit(f"//{host}").hostname not in LOOPBACK:
            return f"host {host[:100]!r} is not this machine"
        if origin is not None and urlsplit(origin).netloc != host:
            return f"pages of {origin[:100]} may not use this server"
        return None

    @property
    def _too_large(self) -> str:
        return f"the upload is larger than {self._limits.upload_bytes / 1e6:g} MB (--max-megabytes)"

    def _counted(self, receive: Receive) -> Receive:
        """A `receive` that accepts at most the allowed number of bytes, and each message only within the time limit.
        After the last message, only a disconnection can follow, and the wait for it has no limit."""
        total = 0
        limit: Seconds | None = self._limits.stall

        async def checked() -> Message:
            nonlocal total, limit
            try:
                message = await asyncio.wait_for(receive(), limit)
            except TimeoutError:
                raise HTTPException(408, f"no data for {self._limits.stall:g} s", _CLOSE) from None
            limit = self._limits.stall if message.get("more_body") else None
            total += len(message.get("body", b""))
            if total > self._limits.upload_bytes:
                raise HTTPException(413, self._too_large, _CLOSE)
            return message

        return checked

    def _hurried(self, send: Send) -> Send:
        """A `send` that disconnects a client that does not read its answer."""

        async def checked(message: Message) -> None:
            await asyncio.wait_for(send(message), self._limits.stall)

        return checked
