"""Deepgram's errors: over HTTP, and as close codes of a WebSocket."""

from __future__ import annotations

from antiphon.protocols.wire import ShapedError

# The paths at which errors have Deepgram's shape.
DEEPGRAM_PATHS = ("/v1/listen", "/v2/listen", "/v1/speak", "/v1/agent/converse")
# The value of `err_code` for each status; for other statuses, Deepgram writes the status in words.
_CODES = {
    400: "Bad Request",
    401: "INVALID_AUTH",
    402: "ASR_PAYMENT_REQUIRED",
    403: "INSUFFICIENT_PERMISSIONS",
    404: "NOT_FOUND",
    408: "SLOW_UPLOAD",
    413: "PAYLOAD_TOO_LARGE",
    429: "TOO_MANY_REQUESTS",
    503: "SERVICE_UNAVAILABLE",
}
# The close code and reason of each way in which the server ends a WebSocket.
BAD_AUDIO = 1008, "DATA-0000"
SILENT = 1011, "NET-0001"
FAILED = 1011, "NET-0000"


def deepgram_error(status: int, code: str, message: str, request_id: str) -> ShapedError:
    """Return a refusal in Deepgram's shape. `code` is ours, which Deepgram's shape does not have."""
    body = {"err_code": _CODES.get(status, "INTERNAL_SERVER_ERROR"), "err_msg": message, "request_id": request_id}
    # Headers are Latin-1, in one line.
    shown = message.encode("ascii", "replace").decode().replace("\n", " ").replace("\r", " ")
    return ShapedError(body, {"dg-error": shown, "dg-request-id": request_id})
