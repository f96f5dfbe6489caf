"""Starts the systemd units with a real systemd, in a container of the image: the third part of `make image`.

    python tests/deploy/units.py [--volume FROM:TO:ro]…

In addition to the image, the container has Debian's systemd and Redis. `deploy/systemd` runs a host and a door in it.
`--volume` gives the fetching of models another volume, such as pip's settings. Each printed line says what systemd or a
client did. The script has to run as root, with Debian's buildah and podman.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.deploy.image import KEY, LIMITS, ROOT, TAG, build_with, podman, ready, runtime, say, transcribed, wait_for
from tests.engines.run import TEXT, talking
from tests.store.servers import free_port

WITH_SYSTEMD = "localhost/antiphon-systemd"
UNITS = ROOT / "deploy" / "systemd"
STORE = "ANTIPHON_STATE=redis://127.0.0.1:6379/0"
SETTINGS = f"ANTIPHON_API_KEYS={KEY}\n{STORE}\nANTIPHON_PORT=8001\nANTIPHON_ADVERTISE=http://127.0.0.1:8001\n"


class Machine:
    """A container that systemd runs as its first process, with the units installed."""

    def __init__(self, folder: Path, volumes: list[str], port: int) -> None:
        (folder / "settings").write_text(SETTINGS)
        (folder / "store").write_text(f"{STORE}\n")
        for file in folder.iterdir():
            file.chmod(0o600)
        seen = [option for volume in volumes for option in ("--volume", volume)]
        self.id = podman(
            *("run", "--detach", "--systemd", "always", "--privileged", "--runtime", runtime(), *LIMITS, *seen),
            *("--volume", f"{folder}:/etc/antiphon:ro", "--volume", f"{UNITS}:/units:ro"),
            *("--publish", f"127.0.0.1:{port}:8000", "--entrypoint", "/lib/systemd/systemd", WITH_SYSTEMD),
        ).stdout.strip()

    def __call__(self, *command: str) -> str:
        return podman("exec", self.id, *command).stdout.strip()

    def property_of(self, unit: str, name: str) -> str:
        return self("systemctl", "show", "--value", "--property", name, unit)


@contextmanager
def machine(volumes: list[str], port: int) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="antiphon-units-") as folder:
        found = Machine(Path(folder), volumes, port)
        try:
            yield found
        except BaseException:
            said = podman("exec", found.id, "journalctl", "--no-pager", "--lines", "60", check=False)
            print(said.stdout, said.stderr, file=sys.stderr)
            raise
        finally:
            podman("rm", "--force", "--volumes", "--time", "0", found.id, check=False)


async def goes_on(at: Machine, url: str) -> None:
    """Kill the host during a conversation. systemd starts it again, and the client is answered."""
    async with talking(url, key=KEY, **TEXT) as talk:
        first = await talk.answer("My name is Ada.")
        killed, restarts = at.property_of("antiphon", "MainPID"), int(at.property_of("antiphon", "NRestarts"))
        begun_s = time.monotonic()
        at("sh", "-c", f"kill -KILL {killed}")
        second = await talk.answer("What is my name?")
        took_s = time.monotonic() - begun_s
    assert second["status"] == "completed", second
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"], second["usage"]
    assert at.property_of("antiphon", "MainPID") not in (killed, "0")
    assert int(at.property_of("antiphon", "NRestarts")) == restarts + 1
    say(f"the host was killed under a conversation, which went on {took_s:.0f} s later, when systemd had started it")


def main() -> None:
    print("units", flush=True)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--volume", action="append", default=[])
    volumes = parser.parse_args().volume
    if podman("image", "exists", TAG, check=False).returncode:
        sys.exit("`make image` first: it builds the image")
    # The image has its files where the units expect them.
    build_with(WITH_SYSTEMD, "systemd redis-server")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with machine(volumes, port) as at:
        # The image already has the user. The other commands are those of docs/deploy.md.
        started = ("running", "degraded")
        wait_for(lambda: podman("exec", at.id, "systemctl", "is-system-running", check=False).stdout.strip() in started)
        at("runuser", "-u", "antiphon", "--", "env", "ANTIPHON_HOME=/var/lib/antiphon/models", "antiphon", "pull")
        at("sh", "-c", "cp /units/*.service /etc/systemd/system/ && systemctl daemon-reload")
        begun_s = time.monotonic()
        at("systemctl", "enable", "--now", "redis-server", "antiphon", "antiphon-door")
        wait_for(lambda: ready(url))
        say(f"a host and a door are ready {time.monotonic() - begun_s:.0f} s after `systemctl enable --now`")
        say(f"by the door it transcribes {transcribed(url)!r}")
        asyncio.run(goes_on(at, url))
        at("systemctl", "stop", "antiphon-door", "antiphon")
        for unit in ("antiphon", "antiphon-door"):
            assert at.property_of(unit, "ActiveState") == "inactive", unit
            assert at.property_of(unit, "Result") == "success", unit
        say("`systemctl stop` ended both with success")


if __name__ == "__main__":
    main()
