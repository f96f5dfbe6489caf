"""SIP messages (RFC 3261): reading and writing requests, responses and the values of their headers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from antiphon.errors import RemoteProtocolError

# The largest message, and the most headers of one.
MAX_MESSAGE_BYTES, MAX_HEADERS = 64 << 10, 128
# The greatest number of a CSeq (RFC 3261, section 8.1.1.5).
MAX_CSEQ = 2**31 - 1
BRANCH_PREFIX = "z9hG4bK"
_COMPACT = {
    "a": "accept-contact",
    "c": "content-type",
    "e": "content-encoding",
    "f": "from",
    "i": "call-id",
    "k": "supported",
    "l": "content-length",
    "m": "contact",
    "o": "event",
    "r": "refer-to",
    "s": "subject",
    "t": "to",
    "v": "via",
    "x": "session-expires",
}
_REQUIRED = ("via", "from", "to", "call-id", "cseq")
_METHOD = re.compile(r"[A-Z]{1,20}")
_URI = re.compile(r"[!#-;=?-~]{1,1024}")
_HEADER_NAME = re.compile(r"[!#-'*+\-.0-9A-Z^-z|~]{1,100}")
_STATUS = re.compile(r"SIP/2\.0 ([1-6]\d\d)(?: (.*))?")
_REQUEST = re.compile(r"(\S+) (\S+) SIP/2\.0")
_CONTENT_LENGTH = re.compile(rb"^(?:content-length|l)[ \t]*:[ \t]*(\d{1,7})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:\s]+)(?::(\d{1,5}))?")
REASONS = {
    100: "Trying",
    180: "Ringing",
    200: "OK",
    400: "Bad SipRequest",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    415: "Unsupported Media Type",
    420: "Bad Extension",
    481: "Call/Transaction Does Not Exist",
    486: "Busy Here",
    487: "SipRequest Terminated",
    488: "Not Acceptable Here",
    491: "SipRequest Pending",
    500: "Server Internal Error",
    503: "Service Unavailable",
    603: "Decline",
}


def bad_sip(message: str) -> RemoteProtocolError:
    """Return the error for a message that is no SIP."""
    return RemoteProtocolError("bad_sip", message)


@dataclass(slots=True, kw_only=True)
class SipMessage:
    """What requests and responses have in common. The names of headers are in lower case, and never compact."""

    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""

    def get(self, name: str) -> str:
        """Return the first value of a header; "" without one."""
        return next((value for known, value in self.headers if known == name), "")

    def all(self, name: str) -> list[str]:
        """Return all values of a header that is a list, whether they are in one line or in several."""
        return [part for known, value in self.headers if known == name for part in _split(value)]

    def add(self, name: str, value: str) -> None:
        """Add a header after the others."""
        self.headers.append((name, value))

    def set(self, name: str, value: str) -> None:
        """Replace all values of a header by this one, in the place of the first."""
        at = next((i for i, (known, _) in enumerate(self.headers) if known == name), len(self.headers))
        before = self.headers[:at]
        self.headers = [*before, (name, value), *((n, v) for n, v in self.headers[at:] if n != name)]

    @property
    def call_id(self) -> str:
        """The id of the call, which its caller has chosen."""
        return self.get("call-id")

    @property
    def cseq(self) -> tuple[int, str]:
        """The number and the method of the CSeq."""
        number, _, method = self.get("cseq").partition(" ")
        return int(number), method.strip()

    @property
    def via(self) -> Via:
        """The topmost Via: that of the sender of a request, and our own in a response."""
        return Via.read(self.all("via")[0])

    @property
    def from_tag(self) -> str:
        """The tag in From; "" without one."""
        return Address.read(self.get("from")).tag

    @property
    def to_tag(self) -> str:
        """The tag in To, which a request outside of a dialog does not have; "" then."""
        return Address.read(self.get("to")).tag

    def _encoded(self, start: str) -> bytes:
        self.set("content-length", str(len(self.body)))
        lines = [start, *(f"{_shown(name)}: {value}" for name, value in self.headers), "", ""]
        return "\r\n".join(lines).encode() + self.body


@dataclass(slots=True, kw_only=True)
class SipRequest(SipMessage):
    """A request: a method, and the URI that it is for."""

    method: str
    uri: str

    def encode(self) -> bytes:
        """Return the request as it is sent."""
        return self._encoded(f"{self.method} {self.uri} SIP/2.0")


@dataclass(slots=True, kw_only=True)
class SipResponse(SipMessage):
    """A response: a status from 100 to 699, and its words."""

    status: int
    reason: str = ""

    def encode(self) -> bytes:
        """Return the response as it is sent."""
        return self._encoded(f"SIP/2.0 {self.status} {self.reason}")


@dataclass(frozen=True, slots=True)
class Via:
    """One value of Via: `transport` is UDP or TCP; `port` is 0 if the value has none."""

    transport: str
    host: str
    port: int
    params: tuple[tuple[str, str], ...]

    @property
    def branch(self) -> str:
        """The branch, which is the name of the transaction."""
        return dict(self.params).get("branch", "")

    @property
    def wants_rport(self) -> bool:
        """Whether responses are to go to the port that the request came from (RFC 3581)."""
        return any(name == "rport" for name, _ in self.params)

    @property
    def key(self) -> tuple[str, str]:
        """The name of the transaction and who has chosen it."""
        return self.branch, f"{self.host}:{self.port}"

    @classmethod
    def read(cls, text: str) -> Via:
        """Read one value of a Via. Raises RemoteProtocolError."""
        protocol, _, rest = text.strip().partition(" ")
        sent_by, *params = rest.split(";")
        found = _HOST_PORT.fullmatch(sent_by.strip())
        name = protocol.rpartition("/")[2].strip().upper()
        if not found or not protocol.upper().startswith("SIP/2.0/") or not name:
            raise bad_sip("A Via is not 'SIP/2.0/TRANSPORT HOST:PORT'.")
        return cls(name, found[1], int(found[2] or 0), _params(params))

    def stamped(self, host: str, port: int) -> str:
        """Return the value with the address that the request came from (RFC 3261, section 18.2.1, and RFC 3581)."""
        params = [(n, v) for n, v in self.params if n not in ("received", "rport")]
        params.append(("received", host))
        if self.wants_rport:
            params.append(("rport", str(port)))
        sent_by = f"{self.host}:{self.port}" if self.port else self.host
        return f"SIP/2.0/{self.transport} {sent_by}" + "".join(f";{n}={v}" if v else f";{n}" for n, v in params)


@dataclass(frozen=True, slots=True)
class Address:
    """The value of From, To, Contact, Refer-To and Route: a URI, and the parameters after it."""

    uri: str
    params: tuple[tuple[str, str], ...] = ()

    @property
    def tag(self) -> str:
        """The tag that one side has given the dialog; "" without one."""
        return dict(self.params).get("tag", "")

    @classmethod
    def read(cls, text: str) -> Address:
        """Read one value of such a header. Raises RemoteProtocolError."""
        text = text.strip()
        if "<" in text:
            before, _, rest = text.partition("<")
            if before.count('"') == 1:
                # The quoted name has a `<`.
                rest = text[1:].partition('"')[2].partition("<")[2]
            uri, closed, after = rest.partition(">")
            if not closed:
                raise bad_sip("An address has no '>'.")
        else:
            uri, semicolon, after = text.partition(";")
            after = semicolon + after
        if not _URI.fullmatch(uri):
            raise bad_sip("An address has no URI.")
        return cls(uri, _params(after.split(";")[1:]))


@dataclass(frozen=True, slots=True)
class SipUri:
    """A `sip:` or `sips:` URI, or a `tel:` URI with the number as `user`. `port` is 0 if the URI has none."""

    scheme: str
    user: str
    host: str
    port: int = 0
    params: tuple[tuple[str, str], ...] = ()

    @property
    def transport(self) -> str:
        """The transport that the URI asks for: udp by default."""
        return dict(self.params).get("transport", "udp").lower()

    @classmethod
    def read(cls, text: str) -> SipUri:
        """Read a URI. Raises RemoteProtocolError for another scheme, and without a host."""
        scheme, _, rest = text.strip().partition(":")
        scheme = scheme.lower()
        if not _URI.fullmatch(text.strip()) or scheme not in ("sip", "sips", "tel"):
            raise bad_sip("A URI is not sip:USER@HOST.")
        rest, *params = rest.partition("?")[0].split(";")
        if scheme == "tel":
            return cls(scheme, rest, "", 0, _params(params))
        user, _, host_port = rest.rpartition("@")
        found = _HOST_PORT.fullmatch(host_port)
        if not found or int(found[2] or 0) > 65535:
            raise bad_sip("A URI is not sip:USER@HOST.")
        return cls(scheme, user.partition(":")[0], found[1].strip("[]"), int(found[2] or 0), _params(params))


def parse(data: bytes) -> SipRequest | SipResponse:
    """Read one message, of a datagram or a framed one. Raises RemoteProtocolError (`bad_sip`)."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise bad_sip(f"A message exceeds {MAX_MESSAGE_BYTES} bytes.")
    head, gap, body = data.partition(b"\r\n\r\n")
    if not gap:
        raise bad_sip("A message has no end of its headers.")
    lines = _unfolded(head.decode("utf-8", "replace").split("\r\n"))
    start, headers = lines[0], [_header(line) for line in lines[1:]]
    if len(headers) > MAX_HEADERS:
        raise bad_sip(f"A message has more than {MAX_HEADERS} headers.")
    message: SipRequest | SipResponse
    if found := _STATUS.fullmatch(start):
        message = SipResponse(status=int(found[1]), reason=found[2] or "", headers=headers)
    elif found := _REQUEST.fullmatch(start):
        if not _METHOD.fullmatch(found[1]) or not _URI.fullmatch(found[2]):
            raise bad_sip("The first line is not valid.")
        message = SipRequest(method=found[1], uri=found[2], headers=headers)
    else:
        raise bad_sip("The first line is neither a request nor a status of SIP/2.0.")
    _check(message)
    message.body = _body(message, body)
    return message


def _check(message: SipRequest | SipResponse) -> None:
    """Raise RemoteProtocolError for a message without a header that each has, or with an invalid one."""
    if missing := [name for name in _REQUIRED if not message.get(name)]:
        raise bad_sip(f"A message has no {missing[0]}.")
    number, _, method = message.get("cseq").partition(" ")
    if not number.isascii() or not number.isdigit() or len(number) > 10 or int(number) > MAX_CSEQ:
        raise bad_sip("The CSeq has no number.")
    if isinstance(message, SipRequest) and method.strip() != message.method:
        raise bad_sip("The CSeq is of another method.")
    if not message.all("via"):
        raise bad_sip("A message has no via.")
    for name in ("from", "to"):
        Address.read(message.get(name))
    if not message.via.branch.startswith(BRANCH_PREFIX):
        raise bad_sip("A Via has no branch.")


def _body(message: SipRequest | SipResponse, body: bytes) -> bytes:
    given = message.get("content-length")
    if not given:
        return body
    if not given.isascii() or not given.isdigit() or len(given) > 7 or int(given) > len(body):
        raise bad_sip("The body is shorter than its Content-Length.")
    return body[: int(given)]


def _unfolded(lines: list[str]) -> list[str]:
    """Join each line that begins with white space to the line before it."""
    out: list[str] = []
    for line in lines:
        if line[:1] in (" ", "\t") and out:
            out[-1] += " " + line.strip()
        else:
            out.append(line)
    return out


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    name = name.strip().lower()
    # Values are copied into responses, so they must not contain line breaks.
    if not colon or not _HEADER_NAME.fullmatch(name) or any(c < " " and c != "\t" for c in value):
        raise bad_sip("A header is not 'NAME: VALUE'.")
    return _COMPACT.get(name, name), value.strip()


def checked_header(name: str, value: str) -> tuple[str, str]:
    """Return a header of an application, whose name begins with X-. Raises RemoteProtocolError for any other."""
    lower = name.lower()
    if not lower.startswith("x-") or not _HEADER_NAME.fullmatch(lower) or not value.isprintable() or len(value) > 1000:
        raise RemoteProtocolError("invalid_value", "A header is 'X-NAME' with a text of one line.", "headers")
    return lower, value


def _split(value: str) -> list[str]:
    """Split a list at its commas, except those in quotes and in angle brackets."""
    if "," not in value:
        return [value] if value else []
    parts, start, depth, is_quoted = list[str](), 0, 0, False
    for at, char in enumerate(value):
        if char == '"' and (not at or value[at - 1] != "\\"):
            is_quoted = not is_quoted
        elif is_quoted:
            continue
        elif char == "<":
            depth += 1
        elif char == ">":
            depth -= 1
        elif char == "," and depth <= 0:
            parts.append(value[start:at])
            start = at + 1
    return [part.strip() for part in (*parts, value[start:]) if part.strip()]


def _params(parts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the parameters of `NAME=VALUE` texts. Names are in lower case."""
    pairs = [part.strip().partition("=") for part in parts if part.strip()]
    return tuple((name.strip().lower(), value.strip().strip('"')) for name, _, value in pairs)


def _shown(name: str) -> str:
    special = {"call-id": "Call-ID", "cseq": "CSeq", "www-authenticate": "WWW-Authenticate"}
    return special.get(name) or "-".join(part.capitalize() for part in name.split("-"))


def answer(
    request: SipRequest, status: int, *, tag: str = "", headers: Sequence[tuple[str, str]] = (), body: bytes = b""
) -> SipResponse:
    """Return the response to a request. `tag` is added to To if the request has none there; "" adds none."""
    copied = [(n, v) for n, v in request.headers if n in ("via", "from", "to", "call-id", "cseq", "record-route")]
    response = SipResponse(status=status, reason=REASONS.get(status, ""), headers=copied, body=body)
    if tag and not request.to_tag:
        response.set("to", f"{request.get('to')};tag={tag}")
    response.headers += headers
    return response


class SipFramer:
    """Finds the messages in a byte stream (TCP): the headers of each say how long its body is."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete now. Empty lines between them, which keep a connection open, are
        dropped. Raises RemoteProtocolError for a message that is too large.
        """
        self._buffer += data
        found: list[bytes] = []
        while True:
            self._buffer = self._buffer.lstrip(b"\r\n")
            end = self._buffer.find(b"\r\n\r\n")
            length = 0
            if end >= 0:
                declared = _CONTENT_LENGTH.search(self._buffer, 0, end)
                length = end + 4 + (int(declared[1]) if declared else 0)
            if max(length, end if end >= 0 else len(self._buffer)) > MAX_MESSAGE_BYTES:
                raise bad_sip(f"A message exceeds {MAX_MESSAGE_BYTES} bytes.")
            if end < 0 or len(self._buffer) < length:
                return found
            found.append(self._buffer[:length])
            self._buffer = self._buffer[length:]
