"""The servers that an engine's requests go to: which one a session asks, and which one after it failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from antiphon.engine.vllm.grammars import RefusedGrammars
from antiphon.errors import Refused
from antiphon.upstream.breaker import ServerBreaker

log = logging.getLogger(__name__)


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
