"""Digest authentication of SIP (RFC 7616, RFC 8760): answers to challenges, and challenges of our own."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable

from antiphon.protocols.telephony.sip.messages import SipRequest, SipResponse

_PARAM = re.compile(r'([A-Za-z][\w-]*)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')
_HASHES: dict[str, Callable[[bytes], hashlib._Hash]] = {"MD5": hashlib.md5, "SHA-256": hashlib.sha256}
REALM = "antiphon"
# Seconds in which a nonce of ours has to be used, and the most used ones that are remembered.
NONCE_S, MAX_USED = 60.0, 10_000


def params_of(value: str) -> dict[str, str]:
    """Return the parameters of a `Digest` challenge, or of the answer to one; {} for another scheme."""
    scheme, _, rest = value.strip().partition(" ")
    if scheme.lower() != "digest":
        return {}
    return {name.lower(): quoted or bare for name, quoted, bare in _PARAM.findall(rest)}


def response_of(given: dict[str, str], method: str, user: str, password: str) -> str | None:
    """Return the `response` for these parameters; None if they ask for something that is not supported."""
    algorithm, qop = given.get("algorithm", "MD5").upper(), given.get("qop", "")
    if algorithm not in _HASHES or qop not in ("", "auth"):
        return None

    def digest(*parts: str) -> str:
        return _HASHES[algorithm](":".join(parts).encode()).hexdigest()

    first = digest(user, given.get("realm", ""), password)
    second = digest(method, given.get("uri", ""))
    if not qop:
        return digest(first, given.get("nonce", ""), second)
    counted = given.get("nc", ""), given.get("cnonce", ""), qop
    return digest(first, given.get("nonce", ""), *counted, second)


def answered(request: SipRequest, challenge: SipResponse, user: str, password: str) -> tuple[str, str] | None:
    """Return the header with which a request that got this 401 or 407 may be sent again: its name and value.

    None if no challenge of the response can be answered. Of several, the strongest is answered.
    """
    name, field = (
        ("proxy-authorization", "proxy-authenticate")
        if challenge.status == 407
        else ("authorization", "www-authenticate")
    )
    # A challenge has commas, so that several of them are never in one line.
    offered = [params_of(value) for known, value in challenge.headers if known == field]
    known = [o for o in offered if o.get("nonce") and o.get("algorithm", "MD5").upper() in _HASHES]
    for asked in sorted(known, key=lambda o: o.get("algorithm", "MD5").upper() != "SHA-256"):
        given = {
            "username": user,
            "realm": asked.get("realm", ""),
            "nonce": asked["nonce"],
            "uri": request.uri,
            "algorithm": asked.get("algorithm", "MD5"),
        }
        if "opaque" in asked:
            given["opaque"] = asked["opaque"]
        if qops := [q.strip() for q in asked.get("qop", "").split(",") if q.strip()]:
            if "auth" not in qops:
                continue
            given |= {"qop": "auth", "nc": "00000001", "cnonce": secrets.token_hex(8)}
        given["response"] = response_of(given, request.method, user, password) or ""
        bare = ("algorithm", "qop", "nc")
        shown = (f"{n}={v}" if n in bare else f'{n}="{_escaped(v)}"' for n, v in given.items())
        return name, "Digest " + ", ".join(shown)
    return None


class Challenger:
    """Asks callers for the one password that they share. A nonce is good for one request. `now_s` is monotonic.

    Nonces are signed and not stored, so that a flood of requests without a password takes no memory.
    """

    def __init__(self, password: str, now_s: Callable[[], float]) -> None:
        self._password, self._now_s = password, now_s
        self._secret = secrets.token_bytes(32)
        self._used: OrderedDict[str, None] = OrderedDict()

    def challenges(self) -> list[tuple[str, str]]:
        """Return the headers of a 401: one for each hash, the stronger first."""
        nonce = self._nonce(f"{self._now_s():.3f}.{secrets.token_hex(8)}")
        shown = f'Digest realm="{REALM}", nonce="{nonce}", qop="auth", algorithm='
        return [("www-authenticate", shown + algorithm) for algorithm in ("SHA-256", "MD5")]

    def admits(self, request: SipRequest) -> bool:
        """Return whether a request shows the password, with a nonce that is ours, recent, and was not used before."""
        given = params_of(request.get("authorization"))
        nonce = given.get("nonce", "")
        made, _, _ = nonce.rpartition(".")
        if not made or not hmac.compare_digest(self._nonce(made).encode(), nonce.encode()) or nonce in self._used:
            return False
        if self._now_s() - float(made.rpartition(".")[0]) > NONCE_S or given.get("realm") != REALM:
            return False
        # Proxies rewrite the URI of a request, so it is not compared. A nonce is good for one request anyway.
        right = response_of(given, request.method, given.get("username", ""), self._password)
        if right is None or not hmac.compare_digest(right.encode(), given.get("response", "").lower().encode()):
            return False
        self._used[nonce] = None
        if len(self._used) > MAX_USED:
            self._used.popitem(last=False)
        return True

    def _nonce(self, made: str) -> str:
        return f"{made}.{hmac.new(self._secret, made.encode(), hashlib.sha256).hexdigest()[:32]}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
