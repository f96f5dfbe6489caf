"""Real Redis and Postgres servers for tests and benchmarks. Each runs in its own folder.

They need Debian's packages redis-server and postgresql. `close` removes everything.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

START_S = 30.0
PASSWORD = "s3cret-of-the-store"


def free_port() -> int:
    """Return a TCP port that no program uses."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def binary(name: str) -> str | None:
    """Return the path of a program, even where Debian keeps some outside of PATH; None if it is not installed."""
    found = shutil.which(name)
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return found or (str(places[-1]) if places else None)


class Server:
    """A server process that can be stopped, killed, made to hang, and started again with its data."""

    needs = ""
    package = ""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address = address
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="antiphon-store-"))
        self.popen: subprocess.Popen[bytes] | None = None

    @classmethod
    def missing(cls) -> str:
        """Return why such a server cannot run here; "" if it can."""
        return "" if binary(cls.needs) else f"{cls.needs} is not installed: apt-get install {cls.package}"

    def command(self) -> list[str]:
        """Return the command that starts the server."""
        raise NotImplementedError

    def answers(self) -> bool:
        """Return whether the server answers."""
        raise NotImplementedError

    def start(self, **how: Any) -> None:
        """Start the server, and wait until it answers."""
        with (self.folder / "log").open("ab") as log:
            self.popen = subprocess.Popen(self.command(), stdout=log, stderr=log, cwd=self.folder, **how)
        until_s = time.monotonic() + START_S
        while not self.answers():
            assert self.popen.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < until_s, (self.folder / "log").read_text()
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGKILL) -> None:
        """Kill the server, and wait for its end."""
        if self.popen:
            self.popen.send_signal(number)
            self.popen.wait(START_S)
            self.popen = None

    def pause(self) -> None:
        """Make the server hang: it keeps connections, but does not answer."""
        assert self.popen
        self.popen.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let the server answer again after `pause`."""
        assert self.popen
        self.popen.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop the server and delete its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class RedisServer(Server):
    """Redis, which is configured to write each command to disk before it answers."""

    needs, package = "redis-server", "redis-server"

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@{self.address}:{self.port}/0"

    def command(self) -> list[str]:
        server = binary(self.needs)
        assert server
        flags = (
            f"--port {self.port} --bind {self.address} --appendonly yes --appendfsync always --requirepass {PASSWORD}"
        )
        return [server, *flags.split(), "--save", "", "--dir", str(self.folder)]

    def client(self) -> Any:
        """Return a separate client, to inspect the keys."""
        import redis

        return redis.Redis.from_url(self.url)

    def answers(self) -> bool:
        import redis

        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def clear(self) -> None:
        """Delete all keys."""
        with self.client() as client:
            client.flushall()


class PostgresServer(Server):
    """Postgres, whose user `antiphon` has a password. It runs as the user `postgres` if the tests run as root."""

    needs, package = "postgres", "postgresql"

    def __init__(self) -> None:
        super().__init__()
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            entry = pwd.getpwnam("postgres")
            self._user = {"user": entry.pw_uid, "group": entry.pw_gid}
            os.chown(self.folder, entry.pw_uid, entry.pw_gid)
        (self.folder / "password").write_text(PASSWORD)
        os.chmod(self.folder / "password", 0o644)
        initdb = binary("initdb")
        assert initdb
        command = [initdb, "-D", str(self._data), "-U", "antiphon", "-A", "scram-sha-256", "--no-sync"]
        files = ["--pwfile", str(self.folder / "password")]
        subprocess.run([*command, *files], check=True, capture_output=True, cwd=self.folder, **self._user)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    @property
    def url(self) -> str:
        return f"postgresql://antiphon:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    def command(self) -> list[str]:
        server = binary(self.needs)
        assert server
        return [server, "-D", str(self._data), "-p", str(self.port), "-k", str(self.folder), "-h", "127.0.0.1"]

    def start(self, **how: Any) -> None:
        super().start(**self._user, **how)

    def stop(self, number: int = signal.SIGQUIT) -> None:
        """Stop the server at once, as a crash does. Its child processes end, too."""
        super().stop(number)

    def client(self) -> Any:
        """Return a separate connection, to inspect the tables."""
        import psycopg

        return psycopg.connect(self.url, autocommit=True)

    def answers(self) -> bool:
        import psycopg

        try:
            self.client().close()
        except psycopg.OperationalError:
            return False
        return True

    def clear(self) -> None:
        """Empty all tables."""
        with self.client() as client:
            tables = [name for (name,) in client.execute("select tablename from pg_tables where schemaname = 'public'")]
            for name in set(tables) - {"antiphon_format"}:
                client.execute(f"truncate {name}")
