"""Calls that a carrier has announced before their media stream, and the signatures of Twilio's requests."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import msgspec
from starlette.requests import HTTPConnection

from antiphon.protocols.telephony.stream import Call
from antiphon.server.credentials import Caller
from antiphon.settings import TelephoneSettings
from antiphon.transports.leg import Voicemail
from antiphon.transports.paths import raw_path

# Seconds in which the media stream of an announced call has to open, and the most calls that may wait for theirs.
TICKET_S, MAX_EXPECTED = 60.0, 10_000
SIGNATURE = "x-twilio-signature"
_DEFAULT_PORTS = {"https": 443, "wss": 443, "http": 80, "ws": 80}


@dataclass(frozen=True, slots=True)
class HoldOptions:
    """How one call is held, where that differs from the settings.

    - `id`: the id of the call for applications.
    - `session`: its session, as JSON with the fields of a `session.update`; None for that of the caller.
    - `greeting`: what the model says first; None for that of the settings.
    - `voicemail`: what is done when an answering machine answers.
    """

    id: str
    session: msgspec.Raw | None = None
    greeting: str | None = None
    voicemail: Voicemail = "ignore"


@dataclass(slots=True)
class ExpectedCall:
    """A call whose media stream is about to open, and the caller that it belongs to. It expires at `until_s`."""

    call: Call
    caller: Caller
    options: HoldOptions
    until_s: float


class ExpectedCalls:
    """The announced calls, by their tickets. A ticket opens one stream. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls: dict[str, ExpectedCall] = {}

    def expect(self, call: Call, caller: Caller, options: HoldOptions, within_s: float = TICKET_S) -> str:
        """Return the ticket for a call's stream, which has to open within `within_s` seconds. If too many calls wait,
        the oldest is forgotten.
        """
        now_s = self._clock()
        for ticket in [t for t, expected in self._calls.items() if expected.until_s <= now_s]:
            del self._calls[ticket]
        while len(self._calls) >= MAX_EXPECTED:
            del self._calls[next(iter(self._calls))]
        ticket = secrets.token_urlsafe(24)
        self._calls[ticket] = ExpectedCall(call, caller, options, now_s + within_s)
        return ticket

    def identify(self, ticket: str, carrier_id: str) -> None:
        """Set the carrier's id of a call that this server makes, once the carrier has given it one."""
        if expected := self._calls.get(ticket):
            expected.call = msgspec.structs.replace(expected.call, id=carrier_id)

    def take(self, ticket: str) -> ExpectedCall | None:
        """Return the call of a ticket, which is void from then on; None for an unknown, used or expired ticket."""
        expected = self._calls.pop(ticket, None)
        return expected if expected and expected.until_s > self._clock() else None


def signature_of(token: str, url: str, params: Iterable[tuple[str, str]] = ()) -> str:
    """Return Twilio's signature of a request: HMAC-SHA1 of the URL and the sorted form fields, in base64."""
    text = url + "".join(name + value for name, value in sorted(set(params)))
    return base64.b64encode(hmac.new(token.encode(), text.encode(), hashlib.sha1).digest()).decode()


def is_signed(connection: HTTPConnection, settings: TelephoneSettings, params: Sequence[tuple[str, str]] = ()) -> bool:
    """Return whether a request has the signature of the configured Twilio account for its URL and form fields."""
    given = connection.headers.get(SIGNATURE, "").encode()
    is_socket = connection.scope["type"] == "websocket"
    right = [
        signature_of(settings.twilio_auth_token, url, params).encode()
        for scheme in (("wss", "ws") if is_socket else ("https", "http"))
        for url in _spellings(public_url(connection, settings, scheme))
    ]
    return any(hmac.compare_digest(given, signature) for signature in right)


def public_url(connection: HTTPConnection, settings: TelephoneSettings, scheme: str, path: str | None = None) -> str:
    """Return the URL of a request as the carrier knows it, or that of another path of this server."""
    base = urlsplit(settings.telephone_url or f"https://{connection.headers.get('host', '')}")
    query = connection.scope.get("query_string", b"").decode("latin-1") if path is None else ""
    path = raw_path(connection.scope) if path is None else path
    return urlunsplit((scheme, base.netloc, base.path + path, str(query), ""))


def _spellings(url: str) -> list[str]:
    """Return a URL with and without its default port: Twilio does not say which of them it signs."""
    parts = urlsplit(url)
    port = f":{_DEFAULT_PORTS[parts.scheme]}"
    bare = parts.netloc.removesuffix(port)
    has_other_port = bare == parts.netloc and ":" in parts.netloc.rpartition("]")[2]
    return [url] if has_other_port else [parts._replace(netloc=n).geturl() for n in (bare, bare + port)]
