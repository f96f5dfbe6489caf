"""Owners of sessions while hosts hang, on a virtual clock, with the real session backend (SQLite).

Hosts hang for up to three times the lifetime of their keys, as during garbage collection, in a debugger or under a
hypervisor, and then continue. Meanwhile clients resume at other hosts. The simulation counts sessions for which two
owners can both write.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

from antiphon.store.sessions import ClaimRefusal, Hold, Host, StoredSession
from antiphon.store.sessions.api import ReceivedCounts
from antiphon.store.sessions.backend import Write
from antiphon.store.sessions.sqlite import SqliteBackend

TTL_S, RENEW_S, STEP_S = 5.0, 1.5, 0.5
# Probabilities, per step: that a session writes, and that a host begins to hang.
WRITES, HANGS = 0.05, 0.02


def pauses(folder: Path, num_hosts: int, num_sessions: int, seconds: float, seed: int) -> Counter[str]:
    """Let hosts hang for `seconds` of virtual time, and count what happens; `two owners` has to stay 0."""
    drawn, now_s, out = random.Random(seed), 0.0, Counter({"two owners": 0})
    backend = SqliteBackend(folder, 1e9, TTL_S, clock=lambda: now_s, uptime=lambda: now_s)
    names = [f"host-{n}/1" for n in range(num_hosts)]
    hangs_until_s = dict.fromkeys(names, -1.0)
    # The sessions that each host believes it owns, and for each session the newest fence of a successful write.
    holds: dict[str, dict[str, StoredSession]] = {name: {} for name in names}
    newest: dict[str, int] = {}
    for number in range(num_sessions):
        name, session = names[number % num_hosts], f"session-{number}"
        row = StoredSession(session, "key", b"token", b"{}", name, 1, ReceivedCounts(0, 0), 0)
        backend.write([Write(Hold(session, name, 1), row)])
        holds[name][session], newest[session] = row, 1
    while now_s < seconds:
        now_s += STEP_S
        for name in names:
            if hangs_until_s[name] < now_s - STEP_S and drawn.random() < HANGS:
                hangs_until_s[name] = now_s + drawn.uniform(0.2, 3.0) * TTL_S
                out["hosts that hung"] += 1
        awake = [name for name in names if hangs_until_s[name] < now_s]
        for name in awake:
            if round(now_s / STEP_S) % round(RENEW_S / STEP_S) == 0:
                backend.renew(Host(name, "", 0.0, False))
            for session, row in list(holds[name].items()):
                if drawn.random() >= WRITES:
                    continue
                (failure,) = backend.write([Write(Hold(session, name, row.fence), replace(row, restores=0))])
                if failure is not None:
                    out["late writes refused"] += 1
                    del holds[name][session]
                elif row.fence < newest[session]:
                    out["two owners"] += 1
                else:
                    out["writes"] += 1
                    newest[session] = row.fence
        # Clients of a host that hangs resume at another host, chosen at random.
        for name in (n for n in names if n not in awake):
            for session in list(holds[name]):
                if not awake or drawn.random() >= WRITES:
                    continue
                other = drawn.choice(awake)
                row_now = backend.read(session)
                assert row_now is not None
                claimed = backend.claim(session, other, row_now.fence)
                if isinstance(claimed, ClaimRefusal):
                    out[f"claims refused, {claimed.value}"] += 1
                    continue
                out["claims"] += 1
                if claimed.fence <= newest[session]:
                    out["two owners"] += 1
                holds[other][session] = claimed
    for session in newest:
        owners = {r.fence for rows in holds.values() for s, r in rows.items() if s == session}
        row_now = backend.read(session)
        assert row_now is not None
        out["sessions without an owner"] += row_now.fence not in owners
    backend.close()
    return out
