"""Reads the SDP offers that begin calls over WebRTC, and checks their size before parsing them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import json_object
from antiphon.server.http.body import limited, limited_form
from antiphon.server.http.errors import BodyTooLarge
from antiphon.shares.threads import in_thread

if TYPE_CHECKING:
    from antiphon.transports.webrtc import WebRtcCall

MAX_BODY_BYTES = 1 << 20
# Limits of an offer, in bytes and candidates. It is parsed on the event loop, where 8,000 candidates took 6 s. Browsers
# send a few kB with fewer than 20 candidates.
MAX_SDP_BYTES, MAX_CANDIDATES = 64 << 10, 64


async def read_offer(request: Request) -> tuple[str, msgspec.Raw | None]:
    """Return a request's SDP offer and its session's configuration; None without a configuration.

    The body is multipart with `sdp` and `session`, or only the offer as `application/sdp`. Raises RemoteProtocolError,
    BodyTooLarge, HTTPException.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if content_type == "application/sdp":
        return _checked((await limited(request, MAX_SDP_BYTES).body()).decode(errors="replace")), None
    if content_type != "multipart/form-data":
        raise HTTPException(415, "Send application/sdp, or multipart/form-data with sdp and session.")
    async with limited_form(request, MAX_BODY_BYTES, max_fields=4, max_files=2) as form:
        fields = {
            k: (await v.read()).decode(errors="replace") if isinstance(v, UploadFile) else v for k, v in form.items()
        }
    if not fields.get("sdp"):
        raise RemoteProtocolError("missing_required_parameter", "Missing required parameter: 'sdp'.", "sdp")
    offer = _checked(fields["sdp"])
    if not fields.get("session"):
        return offer, None
    session = json_object(fields["session"], "session", "session")
    return offer, None if bytes(session) == b"{}" else session


def _checked(offer: str) -> str:
    """Return the offer if it is fast to parse. Raises BodyTooLarge, RemoteProtocolError (`invalid_offer`)."""
    if len(offer) > MAX_SDP_BYTES:
        raise BodyTooLarge(f"An offer may have {MAX_SDP_BYTES} bytes.", param="sdp")
    if offer.count("a=candidate:") > MAX_CANDIDATES:
        raise RemoteProtocolError("invalid_offer", f"An offer may have {MAX_CANDIDATES} candidates.", "sdp")
    return offer


async def new_call(ice_servers: tuple[str, ...]) -> WebRtcCall:
    """Make a call, which is not answered yet. The caller of this function has to end it with `hang_up`."""
    return (await in_thread(_call_class))(ice_servers)


def _call_class() -> type[WebRtcCall]:
    """Import WebRTC on first use, since most servers answer no calls. Takes 0.2 s, so call it in a thread.

    Raises HTTPException if its packages are not installed.
    """
    try:
        from antiphon.transports.webrtc import WebRtcCall
    except ModuleNotFoundError as error:
        needs = f"WebRTC needs {error.name} on the server: pip install '.[webrtc]'."
        raise HTTPException(501, needs) from None
    return WebRtcCall
