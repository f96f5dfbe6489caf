"""Whether one more session fits: by a certificate, by the lights, and by how many have just come. Pure: the time is an
argument, and nothing is remembered but what was admitted and seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from antiphon.capacity.certificate import KINDS, Certificate, Kind, load_of
from antiphon.capacity.lights import Lights
from antiphon.errors import Refused

# What each light is red from, but for `finals`; docs/design/admission.md.
LIMITS = {"loop": 0.25, "lane": 2.0, "wait": 1.0, "memory": 0.95, "system": 0.97, "kv": 0.97}
FINALS_S = 2.0
# Without a certificate, what sessions cost is seen this many seconds after they came. Those that are younger may be so
# many (`--burst-sessions`), or this part of the older ones.
YOUNG_S, MOST_YOUNG, MOST_YOUNG_GPU, YOUNG_PART = 5.0, 8, 64, 0.25
# When a client that was refused may come again: a session that is over makes room; a light is red for some seconds.
RETRY_FULL_S, RETRY_RED_S, RETRY_YOUNG_S = 10.0, 6.0, 2.0
# Sums of shares are not exact.
ROUNDING = 1e-9


class Headroom:
    """Decides for one server. `certificate`: None where live headroom alone rules.

    `max_sessions`: of which a session of a kind without a certificate takes a share. `burst`: sessions that may begin
    within YOUNG_S without a certificate.
    """

    def __init__(self, certificate: Certificate | None, max_sessions: int, *, burst: int = MOST_YOUNG) -> None:
        self.certificate, self.burst, self._max_sessions = certificate, burst, max_sessions
        captions = certificate.kinds.get("captions") if certificate else None
        finals_s = captions.objective.p95_s if captions else FINALS_S
        self.lights = Lights(LIMITS | {"finals": finals_s})
        # When the youngest sessions were admitted. Bound: the burst, or a part of the sessions.
        self._young_s: deque[float] = deque()

    def admit(self, kind: Kind, held: Mapping[Kind, int], now_s: float, *, resumes: bool = False) -> None:
        """Take in one session of a kind beside those that are `held`, or raise Refused, which says why.

        The caller adds the session to `held` before it asks again, and calls `left` with the same `now_s` when it is
        over. `resumes`: a session that lived elsewhere is
        refused only where it was certified that it does not fit.
        """
        if not resumes or self.certificate:
            self.check(kind, held, now_s, lights=not resumes)
        if not self.certificate and not resumes:
            self._young_s.append(now_s)

    def left(self, admitted_s: float) -> None:
        """A session that was admitted at this time is over: it is not young any more."""
        with suppress(ValueError):
            self._young_s.remove(admitted_s)

    def check(self, kind: Kind, held: Mapping[Kind, int], now_s: float, *, lights: bool = True) -> None:
        """Raise Refused as `admit` does, and take nothing in. `lights`: whether a red one refuses."""
        if lights and (red := self.lights.red):
            raise Refused(f"the server has no headroom now ({', '.join(red)})", RETRY_RED_S)
        if self.certificate:
            if self._share(held) + self._share({kind: 1}) > self._most(kind, held) + ROUNDING:
                raise Refused(f"the server holds as many sessions as it was certified for ({kind})", RETRY_FULL_S)
            return
        while self._young_s and now_s - self._young_s[0] >= YOUNG_S:
            self._young_s.popleft()
        older = max(0, sum(held.values()) - len(self._young_s))
        if len(self._young_s) >= max(self.burst, int(YOUNG_PART * older)):
            raise Refused("many sessions have just begun", RETRY_YOUNG_S)

    def load(self, held: Mapping[Kind, int]) -> float | None:
        """The part of what may be held that these sessions take: 1 where no other is admitted.

        None without a certificate: what the machine holds is then not known.
        """
        if not self.certificate:
            return None
        kinds = [kind for kind in KINDS if held.get(kind)]
        return self._share(held) / (self._most(kinds[0], held) if kinds else 1.0)

    def room(self, kind: Kind, held: Mapping[Kind, int]) -> int | None:
        """How many more sessions of a kind would be admitted beside these, one by one: 0 while a light is red.

        None for a kind that is not certified: how many the machine holds is then not known.
        """
        if not self.certificate or kind not in self.certificate.kinds:
            return None
        places = max(0, self._max_sessions - sum(held.values()))
        if self.lights.red:
            return 0
        left = self._most(kind, held) + ROUNDING - self._share(held)
        return max(0, min(places, int(left / self._share({kind: 1}))))

    def _share(self, held: Mapping[Kind, int]) -> float:
        return load_of(held, self.certificate, self._max_sessions)

    def _most(self, kind: Kind, held: Mapping[Kind, int]) -> float:
        """The load that may be reached: less where kinds are mixed."""
        assert self.certificate
        return self.certificate.most_mixed if any(held.get(other) for other in KINDS if other != kind) else 1.0
