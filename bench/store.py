"""The session store: how long a fenced write of a conversation takes, and a claim, in each of its homes.

    antiphon bench store [--writes 1000] [--kb 12]

A write is what a session waits for before it tells its client of an item: given to the writing thread, fenced, and
acknowledged by the home. Redis writes each command to its disk (`appendfsync always`), or each second (`everysec`);
Postgres commits each. Both are Debian's, on this machine; a home that is not installed is left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.common import machine, percentile, save, table
from tests.store.servers import PostgresServer, RedisServer, Server

from antiphon.store.sessions import SessionStore, StoredSession, open_store

WAIT_S = 30.0
# Sessions that write at the same moment.
AT_ONCE = 40


def row(name: str, snapshot: bytes, fence: int = 1) -> StoredSession:
    return StoredSession(name, "who", bytes(32), snapshot, "bench/1", fence)


def timed_ms(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    work()
    return (time.perf_counter() - began_s) * 1000


def measure(store: SessionStore, writes: int, num_bytes: int) -> dict[str, float]:
    """Milliseconds: of one session's writes, of writes of AT_ONCE sessions at once, and of claims."""
    snapshots = [bytes([65 + n % 26]) * num_bytes for n in range(26)]
    for n in range(50):
        store.put(row("alone", snapshots[n % 26])).result(WAIT_S)
    alone = [timed_ms(lambda n=n: store.put(row("alone", snapshots[n % 26])).result(WAIT_S)) for n in range(writes)]

    def all_at_once(n: int) -> None:
        for write in [store.put(row(f"many-{k}", snapshots[n % 26])) for k in range(AT_ONCE)]:
            write.result(WAIT_S)

    many = [timed_ms(lambda n=n: all_at_once(n)) for n in range(writes // AT_ONCE)]
    claims = [timed_ms(lambda n=n: store.claim("alone", "bench/1", n + 1)) for n in range(writes // 4)]
    return {
        "write_p50_ms": percentile(alone, 50),
        "write_p99_ms": percentile(alone, 99),
        f"write_{AT_ONCE}_at_once_p50_ms": percentile(many, 50),
        f"write_{AT_ONCE}_at_once_p99_ms": percentile(many, 99),
        "claim_p50_ms": percentile(claims, 50),
        "claim_p99_ms": percentile(claims, 99),
    }


def of_server(server: Server, url: str, writes: int, num_bytes: int, setting: tuple[str, str] | None) -> dict[str, Any]:
    """Start a server, measure, and delete it. `setting`: of Redis, changed before."""
    server.start()
    try:
        if setting and isinstance(server, RedisServer):
            with server.client() as client:
                client.config_set(*setting)
        store = open_store(url, 3600)
        try:
            return measure(store, writes, num_bytes)
        finally:
            store.close()
    finally:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="antiphon bench store", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--writes", type=int, default=1000)
    parser.add_argument("--kb", type=int, default=12, help="size of a snapshot")
    args = parser.parse_args()
    num_bytes = args.kb * 1000
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder, 3600)
        found["sqlite"] = measure(store, args.writes, num_bytes)
        store.close()
    for fsync in () if RedisServer.missing() else ("everysec", "always"):
        redis = RedisServer()
        setting = ("appendfsync", fsync)
        found[f"redis, {fsync}"] = of_server(redis, redis.url, args.writes, num_bytes, setting)
    if not PostgresServer.missing():
        postgres = PostgresServer()
        found["postgres"] = of_server(postgres, postgres.url, args.writes, num_bytes, None)
    figures = list(next(iter(found.values())))
    table(
        f"fenced writes of {args.kb} kB and claims, ms",
        ["home", *(name.removesuffix("_ms").replace("_", " ") for name in figures)],
        [[home, *(found[home][name] for name in figures)] for home in found],
    )
    result = {"machine": machine(), "writes": args.writes, "snapshot_bytes": num_bytes, "homes": found}
    print(f"\nwritten: {save('store', result)}")


if __name__ == "__main__":
    main()
