"""The servers that an engine's requests go to: which one a session asks, which one after it failed, and which grammars
each refuses, so that they are not sent to it again for some minutes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from antiphon.engine.api import Grammar
from antiphon.errors import Refused
from antiphon.remote.breaker import ServerBreaker

# Bound: refused grammars that are remembered; the oldest is forgotten first.
MAX_REFUSED = 256
# After this a server is asked again: it may have been started anew, with another library.
LOOK_AGAIN_S = 300.0
# A grammar of our own for each kind, which every library takes: a server that refuses it takes none of that kind.
TRIVIAL = {
    "json_schema": Grammar("json_schema", '{"type": "boolean"}'),
    "lark": Grammar("lark", 'start: "yes" | "no"\n'),
}


class RefusedGrammars:
    """What one server has refused. Pure; times are monotonic seconds.

    A grammar is remembered for the owner that sent it: a request may also be refused for something else in it. That the
    server takes no grammars of a kind is found out with one of our own.
    """

    def __init__(self) -> None:
        self._until_s: dict[tuple[Hashable, str, bytes], float] = {}
        # Of each kind that was tried with a grammar of our own: whether the server takes it, and until when that holds.
        self._kinds: dict[str, tuple[bool, float]] = {}

    def is_refused(self, owner: Hashable, rule: Grammar, now_s: float) -> bool:
        """Whether the server would refuse a grammar of this owner."""
        takes, until_s = self._kinds.get(rule.kind, (True, 0.0))
        return (not takes and now_s < until_s) or now_s < self._until_s.get(_name(owner, rule), 0.0)

    def refused(self, owner: Hashable, rule: Grammar, now_s: float) -> bool:
        """The server has refused a grammar. Return whether it is to be tried with one of our own."""
        self._until_s.pop(name := _name(owner, rule), None)
        self._until_s[name] = now_s + LOOK_AGAIN_S
        if len(self._until_s) > MAX_REFUSED:
            del self._until_s[next(iter(self._until_s))]
        return now_s >= self._kinds.get(rule.kind, (True, 0.0))[1]

    def tried(self, kind: str, now_s: float, *, takes: bool) -> None:
        """The server was tried with a grammar of our own."""
        self._kinds[kind] = takes, now_s + LOOK_AGAIN_S


def _name(owner: Hashable, rule: Grammar) -> tuple[Hashable, str, bytes]:
    return owner, rule.kind, hashlib.sha256(rule.text.encode()).digest()


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server.

    - `url`: its root, without a slash at the end.
    - `verified`: what it serves has been compared with what is expected, and it has not failed since.
    - `sessions`: sessions whose rows it has. `requests`, `failures`: counted since the start.
    """

    url: str
    breaker: ServerBreaker = field(default_factory=ServerBreaker)
    grammars: RefusedGrammars = field(default_factory=RefusedGrammars)
    verified: bool = False
    sessions: int = 0
    requests: int = 0
    failures: int = 0

    @property
    def host(self) -> str:
        """Its host and port, for messages."""
        return urlsplit(self.url).netloc

    def failed(self, owner: Hashable | None) -> None:
        """Count a failure of an owner's request; what it serves is looked at again before it is asked the next time."""
        self.failures += 1
        self.verified = False
        self.breaker.failed(owner, time.monotonic())


class Endpoints:
    """The servers of one model. Each has a breaker of its own, and a session stays with its server while that works."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = tuple(Endpoint(url) for url in dict.fromkeys(url.rstrip("/") for url in urls))

    def choose(self, owner: Hashable | None, bound: Endpoint | None, avoid: Collection[Endpoint] = ()) -> Endpoint:
        """The server to ask for an owner: `bound` where it may be asked, otherwise the one with the fewest sessions.

        `avoid`: servers that have failed this request; one of them is taken only where there is no other. Raises
        Refused where all are left alone for now.
        """
        now_s, refused = time.monotonic(), list[Refused]()
        others = sorted(self.all, key=lambda e: (e in avoid, e is not bound, e.sessions))
        for endpoint in others:
            try:
                endpoint.breaker.check(owner, now_s)
            except Refused as error:
                refused.append(error)
                continue
            return endpoint
        raise min(refused, key=lambda error: error.retry_after_s)
