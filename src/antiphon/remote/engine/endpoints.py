"""The servers of an engine in its pool, and the grammars that they have refused.

A grammar that a server has refused is not sent to that server again for some minutes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field

from antiphon.engine.api import Grammar
from antiphon.remote.pool import Endpoint

# The maximum number of refused grammars that are remembered. The oldest is forgotten first.
MAX_REFUSED = 256
# Seconds after which a server is tried again, because it may have restarted with another grammar library.
LOOK_AGAIN_S = 300.0
# A trivial grammar of each kind that every library accepts. A server that refuses it supports no grammars of that kind.
TRIVIAL = {
    "json_schema": Grammar("json_schema", '{"type": "boolean"}'),
    "lark": Grammar("lark", 'start: "yes" | "no"\n'),
}


class RefusedGrammars:
    """The grammars that one server has refused. Pure; times are monotonic seconds.

    A refusal is remembered for the owner that sent the grammar, because something else in its request may be the
    reason. A trivial grammar shows whether the server supports a kind of grammar at all.
    """

    def __init__(self) -> None:
        self._until_s: dict[tuple[Hashable, str, bytes], float] = {}
        # For each kind that was tried with a trivial grammar: whether the server accepts it, and until when that holds.
        self._kinds: dict[str, tuple[bool, float]] = {}

    def is_refused(self, owner: Hashable, rule: Grammar, now_s: float) -> bool:
        """Whether the server is expected to refuse a grammar of this owner."""
        takes, until_s = self._kinds.get(rule.kind, (True, 0.0))
        return (not takes and now_s < until_s) or now_s < self._until_s.get(_name(owner, rule), 0.0)

    def refused(self, owner: Hashable, rule: Grammar, now_s: float) -> bool:
        """Note that the server has refused a grammar. Return whether to try a trivial one."""
        self._until_s.pop(name := _name(owner, rule), None)
        self._until_s[name] = now_s + LOOK_AGAIN_S
        if len(self._until_s) > MAX_REFUSED:
            del self._until_s[next(iter(self._until_s))]
        return now_s >= self._kinds.get(rule.kind, (True, 0.0))[1]

    def tried(self, kind: str, now_s: float, *, takes: bool) -> None:
        """Note whether the server accepts a trivial grammar."""
        self._kinds[kind] = takes, now_s + LOOK_AGAIN_S


def _name(owner: Hashable, rule: Grammar) -> tuple[Hashable, str, bytes]:
    return owner, rule.kind, hashlib.sha256(rule.text.encode()).digest()


@dataclass(slots=True, eq=False)
class EngineEndpoint(Endpoint):
    """One of an engine's servers, with its state. A session stays with its server while that works."""

    # The grammars that it has refused.
    grammars: RefusedGrammars = field(default_factory=RefusedGrammars)
    # True if the expected model was found there, and the server has not failed since.
    verified: bool = False
    # The number of sessions whose rows it has.
    sessions: int = 0

    @property
    def load(self) -> int:
        """The load by which servers are compared: the sessions whose rows they have."""
        return self.sessions

    def failed(self, owner: Hashable | None) -> None:
        """Count a failure of an owner's request. The server is verified again before its next request."""
        self.failures += 1
        self.verified = False
        # Not `super()`, which a dataclass with slots breaks.
        Endpoint.failed(self, owner)
