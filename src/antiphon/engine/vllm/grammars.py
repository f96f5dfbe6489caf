"""Which grammars one server refuses, so that they are not sent to it again for some minutes."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

from antiphon.engine.api import Grammar

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
