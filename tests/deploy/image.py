"""Builds and runs the image as docs/deploy.md says: `make image`.

    python tests/deploy/image.py [--volume FROM:TO:ro]…

buildah builds the image without a daemon, on a base that is made of Debian's packages (`BASE` names another one).
Podman runs it with the same restrictions as the chart. `--volume` gives the build and the fetching of models another
volume, such as pip's settings. Each printed line says what a container did. The script has to run as root, with
Debian's buildah, debootstrap and podman.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.engines.run import TEXT, talking
from tests.store.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
TAG = "localhost/antiphon-tested"
RECORDING = ROOT / "tests" / "data" / "audio" / "tau2-yes.flac"
# The restrictions of the chart: a read-only root, no capabilities, and no way to gain privileges.
STRICT = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "all", "--security-opt", "no-new-privileges")
# Podman's default limits may be higher than this machine allows.
LIMITS = ("--ulimit", "nofile=16384:16384", "--ulimit", "nproc=16384:16384")
KEY = "secret"
USER = "10001"
READY_S, STOP_S = 300.0, 30


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def podman(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run podman, for at most READY_S.

    Raises TimeoutExpired, and CalledProcessError if it fails and `check` is true.
    """
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False, timeout=READY_S)
    if check and done.returncode:
        print(done.stderr, file=sys.stderr)
        done.check_returncode()
    return done


@cache
def runtime() -> str:
    """Return the runtime that can run containers here. This depends on the kernel's cgroups."""
    for name in ("crun", "runc"):
        if podman("run", "--rm", "--runtime", name, *LIMITS, TAG, "--version", check=False).returncode == 0:
            return name
    raise RuntimeError("neither crun nor runc runs a container here")


class Container:
    """A running container of the image, with the chart's restrictions and the volume of models."""

    def __init__(self, volume: Path, *options: str, command: Sequence[str] = ()) -> None:
        self.id = podman(
            *(
                "run",
                "--detach",
                "--runtime",
                runtime(),
                *LIMITS,
                *STRICT,
                "--volume",
                f"{volume}:/var/lib/antiphon",
                *options,
                TAG,
                *command,
            )
        ).stdout.strip()

    def asked(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container."""
        return podman("exec", self.id, *command, check=False)

    def is_healthy(self) -> bool:
        """Return whether the image's own health check passes."""
        return podman("healthcheck", "run", self.id, check=False).returncode == 0

    def stop(self) -> tuple[int, float]:
        """End it by SIGTERM. Return its exit status, and the seconds that it took."""
        begun_s = time.monotonic()
        podman("stop", "--time", str(STOP_S), self.id)
        took_s = time.monotonic() - begun_s
        return int(podman("wait", self.id).stdout), took_s

    def close(self) -> None:
        podman("rm", "--force", "--time", "0", self.id, check=False)


@contextmanager
def container(volume: Path, *options: str, command: Sequence[str] = ()) -> Iterator[Container]:
    """Yield a container, which is removed at the end of the block.

    If the block fails, the container's log is printed.
    """
    found = Container(volume, *options, command=command)
    try:
        yield found
    except BaseException:
        print(podman("logs", "--tail", "40", found.id, check=False), file=sys.stderr)
        raise
    finally:
        found.close()


def build(options: Sequence[str]) -> None:
    begun_s = time.monotonic()
    variables = os.environ | {"TAG": TAG, "BASE": os.environ.get("BASE", "debootstrap")}
    subprocess.run(["sh", ROOT / "deploy" / "build.sh", "--isolation", "chroot", *options], env=variables, check=True)
    (found,) = json.loads(podman("inspect", "--type", "image", TAG).stdout)
    assert found["User"] == found["Config"]["User"] == f"{USER}:{USER}", found["User"]
    assert found["Healthcheck"]["Test"], "the image has no check of its health"
    say(f"built in {time.monotonic() - begun_s:.0f} s: {found['Size'] / 1e9:.1f} GB, user {found['User']}")


def build_with(name: str, packages: str) -> None:
    """Build an image with this name from the tested image and these packages of Debian. Its user is root."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "Dockerfile"
        install = f"apt-get update -qq && apt-get install -y -qq --no-install-recommends {packages}"
        file.write_text(f"FROM {TAG}\nUSER root\nENTRYPOINT []\nRUN {install}\n")
        command = ["buildah", "bud", "-q", "--layers", "--isolation", "chroot", "-f", str(file), "-t", name, folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def wait_for(true: Callable[[], bool]) -> None:
    """Wait until a function returns true. Raises TimeoutError after READY_S."""
    until_s = time.monotonic() + READY_S
    while not true():
        if time.monotonic() > until_s:
            raise TimeoutError
        time.sleep(0.2)


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def transcribed(url: str) -> str:
    """Return the text that the server at `url` recognizes in a recording."""
    answer = httpx.post(
        f"{url}/v1/audio/transcriptions",
        files={"file": (RECORDING.name, RECORDING.read_bytes())},
        data={"model": "whisper-1"},
        headers={"authorization": f"Bearer {KEY}"},
        timeout=120,
        trust_env=False,
    )
    answer.raise_for_status()
    return str(answer.json()["text"])


def spoken(url: str) -> int:
    """Return the number of bytes of audio that the server at `url` speaks."""
    answer = httpx.post(
        f"{url}/v1/audio/speech",
        json={"model": "tts-1", "input": "Good morning.", "voice": "alloy", "response_format": "pcm"},
        headers={"authorization": f"Bearer {KEY}"},
        timeout=120,
        trust_env=False,
    )
    answer.raise_for_status()
    return len(answer.content)


async def answered(url: str) -> str:
    """Return the answer of the server at `url` in a conversation."""
    async with talking(url, key=KEY, **TEXT) as talk:
        response = await talk.answer("Say hello.")
    assert response["status"] == "completed", response
    return str(response["output"][0]["content"][0]["text"])


def serve(volume: Path) -> None:
    """Run the image's own command, and a door. They share a network, as the containers of a pod do."""
    port, door_port = free_port(), free_port()
    url, door = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{door_port}"
    keys = ("--env", f"ANTIPHON_API_KEYS={KEY}")
    published = ("--publish", f"127.0.0.1:{port}:8000", "--publish", f"127.0.0.1:{door_port}:8001")
    begun_s = time.monotonic()
    with container(volume, *keys, *published) as host:
        wait_for(lambda: ready(url))
        say(f"ready {time.monotonic() - begun_s:.0f} s after it was started, the volume filled")
        assert host.asked("id", "-u").stdout.strip() == USER
        assert host.asked("sh", "-c", "touch /opt/antiphon/x").returncode
        assert host.asked("sh", "-c", "touch /var/lib/antiphon/x").returncode == 0
        assert host.is_healthy()
        say(f"it is healthy, runs as {USER}, and can write to its volume alone")
        heard = transcribed(url)
        assert "yes" in heard.lower(), heard
        say(f"it transcribes {heard!r}, speaks {spoken(url)} bytes and answers {asyncio.run(answered(url))!r}")
        gate = ("serve", "--role", "door", "--port", "8001", "--behind", "http://127.0.0.1:8000", "--allow-anonymous")
        shared = ("--network", f"container:{host.id}", "--env", "ANTIPHON_PORT=8001")
        with container(volume, *shared, command=gate) as beside:
            wait_for(lambda: ready(door))
            assert beside.is_healthy()
            assert transcribed(door) == heard
            say(f"a door in front of it is healthy, and carries a conversation: {asyncio.run(answered(door))!r}")
            status, took_s = beside.stop()
            assert status == 0, status
            say(f"the door ended with 0 in {took_s:.1f} s")
        status, took_s = host.stop()
        assert status == 0, status
        say(f"it ended with 0 in {took_s:.1f} s")


def alone(volume: Path) -> None:
    """Check that a host starts without a network if the volume already has the models."""
    with container(volume, "--network", "none", "--env", f"ANTIPHON_API_KEYS={KEY}") as host:
        asked = "import http.client; c = http.client.HTTPConnection('127.0.0.1', 8000); c.request('GET', '/ready');"
        asked += "raise SystemExit(c.getresponse().status != 200)"
        wait_for(lambda: host.asked("python3", "-c", asked).returncode == 0)
        say("from the filled volume it is ready without a network")
    with container(volume, "--network", "none") as host:
        status = int(podman("wait", host.id).stdout)
        said = podman("logs", host.id).stderr + podman("logs", host.id).stdout
        assert status != 0
        assert "ANTIPHON_API_KEYS" in said, said
        say(f"without keys, at an address that others reach, it ends with {status} and says which setting to give")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--volume", action="append", default=[])
    seen = [option for volume in parser.parse_args().volume for option in ("--volume", volume)]
    build(seen)
    with tempfile.TemporaryDirectory(prefix="antiphon-image-") as folder:
        volume = Path(folder)
        os.chown(volume, int(USER), int(USER))
        begun_s = time.monotonic()
        with container(volume, *seen, command=["pull"]) as pulled:
            status = int(podman("wait", pulled.id).stdout)
            assert status == 0, status
        size = sum(file.stat().st_size for file in volume.rglob("*") if file.is_file() and not file.is_symlink())
        say(f"`pull` filled the volume in {time.monotonic() - begun_s:.0f} s: {size / 1e9:.1f} GB")
        serve(volume)
        alone(volume)


if __name__ == "__main__":
    main()
