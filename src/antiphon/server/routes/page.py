"""Serves the page at / with its files (`antiphon/web`), and a list of URLs to clients that do not accept HTML."""

from __future__ import annotations

import mimetypes
import re
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from antiphon import __version__
from antiphon.server.http.errors import error_response
from antiphon.server.state import ServerState

# The page may only load its own files and connect to its own server. This keeps out foreign scripts, and keeps any
# script from sending data to another server by HTTP or a WebSocket.
POLICY = (
    "default-src 'self'; connect-src 'self'{sockets}; img-src 'self' data:; media-src 'self' blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
# Matches a Host header that may appear in the policy. The client chooses the header, and a `;` in it would extend the
# policy.
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*(:[0-9]{1,5})?")
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
WEB = files("antiphon") / "web"
# Maximum length of a file name. No file here has a longer name, and a longer name might cause an error of the file
# system.
MAX_NAME_CHARS = 64


async def root(request: Request) -> Response:
    """GET /: return the page to a client that accepts HTML, or else a list of URLs in plain text."""
    if "text/html" in request.headers.get("accept", ""):
        return _file(request, "index.html")
    state: ServerState = request.app.state.antiphon
    lines = [
        f"antiphon {__version__}",
        "",
        "GET  /                             in a browser: talk to it, captions, speech",
        "WS   /v1/realtime                  "
        "conversations (OpenAI Realtime), streaming transcription (vLLM dialect, OpenAI)",
        "WS   /v1/realtime?duplex=1         full duplex; also /v1/duplex, /v1/omni",
        "POST /v1/realtime/calls            the same over WebRTC",
        "POST /v1/realtime/client_secrets   a short-lived key for a browser",
        "POST /v1/audio/transcriptions      a file to text, streamed or whole",
        "POST /v1/audio/translations        a file to English",
        "POST /v1/chat/completions          a conversation's next turn, streamed or whole",
        "WS   /v1/audio/speech/stream       text to speech, while the text arrives",
        "POST /v1/audio/speech  /batch      text to speech, streamed or whole; /v1/audio/voices",
        "WS   /v1/video/chat/stream         frames and audio in, answers out",
        "GET  /v1/models  /health  /ready  /metrics",
        "",
        f"ready: {'yes' if state.models and not state.admission.draining else 'no'}",
    ]
    return PlainTextResponse("\n".join(lines) + "\n")


async def asset(request: Request) -> Response:
    """GET /web/{name}: return one of the page's files; 404 for any other name."""
    return _file(request, request.path_params["name"])


async def client_module(request: Request) -> Response:
    """GET /web/client/{name}: return a file of the page's client module; 404 for any other name."""
    return _file(request, request.path_params["name"], WEB / "client")


def policy(host: str) -> str:
    """Return the Content-Security-Policy for a request with this Host header.

    It names the server's WebSockets in addition to 'self', which does not include them in Safari before 15.4.
    """
    known = len(host) <= 255 and _HOST.fullmatch(host)
    return POLICY.format(sockets=f" ws://{host} wss://{host}" if known else "")


def _file(request: Request, name: str, folder: Traversable = WEB) -> Response:
    path = folder / name
    if "/" in name or name.startswith(".") or len(name) > MAX_NAME_CHARS or not path.is_file():
        return error_response(404, f"There is no {name} here.", code="not_found")
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    kind = "text/javascript" if name.endswith(".js") else kind
    headers = HEADERS | {"Content-Security-Policy": policy(request.headers.get("host", ""))}
    return Response(path.read_bytes(), media_type=kind, headers=headers)
