"""The session store: the time of a fenced write of a conversation and of a claim, for each backend.

    antiphon bench store [--writes 1000] [--kb 12]

A session waits for such a write before it sends an item to its client. The item is passed to the writing thread,
written with its fence, and acknowledged by the backend. Redis writes to its disk at each command (`appendfsync always`)
or each second (`everysec`). Postgres commits each write. Both are Debian's packages on this machine. A backend that is
not installed is skipped.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from bench.common import machine, options, save, show, spread
from tests.store.servers import PostgresServer, RedisServer

from antiphon.store.sessions import SessionStore, StoredSession, open_store

WAIT_S = 30.0
# Number of sessions that write at once.
AT_ONCE = 40


def row(name: str, snapshot: bytes, fence: int = 1) -> StoredSession:
    return StoredSession(name, "who", bytes(32), snapshot, "bench/1", fence)


def timed_ms(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    work()
    return (time.perf_counter() - began_s) * 1000


def measure(store: SessionStore, writes: int, num_bytes: int) -> dict[str, float]:
    """Return the milliseconds of one session's writes, of writes of AT_ONCE sessions at once, and of claims."""
    snapshots = [bytes([65 + n % 26]) * num_bytes for n in range(26)]
    for n in range(50):
        store.put(row("alone", snapshots[n % 26])).result(WAIT_S)
    alone = [timed_ms(lambda n=n: store.put(row("alone", snapshots[n % 26])).result(WAIT_S)) for n in range(writes)]

    def all_at_once(n: int) -> None:
        for write in [store.put(row(f"many-{k}", snapshots[n % 26])) for k in range(AT_ONCE)]:
            write.result(WAIT_S)

    many = [timed_ms(lambda n=n: all_at_once(n)) for n in range(writes // AT_ONCE)]
    claims = [timed_ms(lambda n=n: store.claim("alone", "bench/1", n + 1)) for n in range(writes // 4)]
    took = {"write": alone, f"write_{AT_ONCE}_at_once": many, "claim": claims}
    return {key: value for name, ms in took.items() for key, value in spread(ms, name, "ms", qs=(50, 99)).items()}


def of_server(server: PostgresServer | RedisServer, writes: int, num_bytes: int, appendfsync: str = "") -> Any:
    """Start the server of a backend, measure it, and delete it. `appendfsync` is a setting of Redis."""
    server.start()
    with closing(server):
        if isinstance(server, RedisServer):
            with server.client() as client:
                client.config_set("appendfsync", appendfsync)
        with closing(open_store(server.url, 3600)) as store:
            return measure(store, writes, num_bytes)


def main() -> None:
    parser = options("antiphon bench store", __doc__)
    parser.add_argument("--writes", type=int, default=1000)
    parser.add_argument("--kb", type=int, default=12, help="size of a snapshot")
    args = parser.parse_args()
    num_bytes = args.kb * 1000
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, closing(open_store(folder, 3600)) as store:
        found["sqlite"] = measure(store, args.writes, num_bytes)
    for fsync in () if RedisServer.missing() else ("everysec", "always"):
        found[f"redis, {fsync}"] = of_server(RedisServer(), args.writes, num_bytes, fsync)
    if not PostgresServer.missing():
        found["postgres"] = of_server(PostgresServer(), args.writes, num_bytes)
    show(f"fenced writes of {args.kb} kB and claims", found)
    result = {"machine": machine(), "writes": args.writes, "snapshot_bytes": num_bytes, "homes": found}
    print(f"\nwritten: {save('store', result)}")


if __name__ == "__main__":
    main()
