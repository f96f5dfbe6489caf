"""Runs the compose file, as far as this is possible without an image registry: the second part of `make image`.

    python tests/deploy/compose.py [--volume FROM:TO:ro]…

podman-compose starts `deploy/compose.yaml` with the image that `make image` has built. HAProxy, the store and
Prometheus are Debian's, instead of the images that the file names. Grafana is left out, because Debian does not have
it. `--volume` gives the container that fetches models another volume, such as pip's settings. Each printed line says
what a client did and what it got. The script has to run as root, with Debian's buildah, podman, netavark and
aardvark-dns. It uses the ports that the file names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.clients.run import environment
from tests.deploy.image import KEY, ROOT, TAG, build_with, podman, ready, runtime, say, transcribed, wait_for
from tests.engines.run import TEXT, talking

HERE = Path(__file__).resolve().parent
FILE = ROOT / "deploy" / "compose.yaml"
SERVERS = "localhost/antiphon-servers"
URL = "http://127.0.0.1:8000"
METRICS_KEY = "of-prometheus"
# Debian has no Grafana, and the compose file starts the others only on request.
LEFT_OUT = ("grafana", "postgres", "vllm", "home", "home-assistant")
HOSTS, DOORS = ("host-1", "host-2"), ("door-1", "door-2")
# Podman's settings: netavark's DNS server resolves the names of services, and the limits are low enough for any
# machine.
SETTINGS = """
[containers]
default_ulimits = ["nofile=16384:16384", "nproc=16384:16384"]
[engine]
runtime = "{runtime}"
[network]
network_backend = "netavark"
"""


def replaced(volumes: list[str]) -> dict[str, Any]:
    """Return the content of the file, with Debian's servers instead of its images.

    `models` gets the given volumes, too.
    """
    found: dict[str, Any] = yaml.safe_load(FILE.read_text())
    services = found["services"]
    for name in LEFT_OUT:
        del services[name]
    for service in services.values():
        service["volumes"] = [
            str(FILE.parent / volume) if volume.startswith("./") else volume for volume in service.get("volumes", ())
        ]
        service.pop("build", None)
    services["models"]["volumes"] += volumes
    store = ["--protected-mode", "no", "--dir", "/data"]
    commands = {
        "haproxy": ["haproxy", "-W", "-db", "-f", "/usr/local/etc/haproxy/haproxy.cfg"],
        # Debian's program has another name. The other options are set in the image of Valkey.
        "valkey": ["redis-server", *services["valkey"]["command"][1:], *store],
        "prometheus": services["prometheus"]["command"],
    }
    for name, command in commands.items():
        services[name] |= {"image": SERVERS, "command": command}
    services["valkey"]["healthcheck"]["test"] = ["CMD", "redis-cli", "ping"]
    return found


class Composed:
    """The services of the compose file, run by podman-compose."""

    def __init__(self, folder: Path, volumes: list[str]) -> None:
        (folder / "containers.conf").write_text(SETTINGS.format(runtime=runtime()))
        os.environ["CONTAINERS_CONF"] = str(folder / "containers.conf")
        given = folder / "compose.yaml"
        given.write_text(yaml.safe_dump(replaced(volumes)))
        python = environment("podman_compose", HERE)
        self._command = [str(python), "-m", "podman_compose", "-f", str(given)]
        self._variables = os.environ | {"ANTIPHON_API_KEYS": KEY, "ANTIPHON_METRICS_KEY": METRICS_KEY, "IMAGE": TAG}

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command, *arguments], env=self._variables, capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(done.stdout, done.stderr, file=sys.stderr)
            done.check_returncode()
        return done.stdout

    def state(self, service: str) -> dict[str, Any]:
        (found,) = json.loads(podman("inspect", f"antiphon_{service}_1").stdout)
        state: dict[str, Any] = found["State"]
        return state


def check_health(over: threading.Event) -> None:
    """Check each container's health every second until `over` is set.

    Podman leaves these checks to systemd's timers, but a sandbox has no systemd.
    """
    while not over.wait(1.0):
        for name in podman("ps", "--format", "{{.Names}}", check=False).stdout.split():
            podman("healthcheck", "run", name, check=False)


@contextmanager
def composed(volumes: list[str]) -> Iterator[Composed]:
    """Yield the services of the file. At the end of the block, they are removed with their volumes."""
    with tempfile.TemporaryDirectory(prefix="antiphon-compose-") as folder:
        found = Composed(Path(folder), volumes)
        over = threading.Event()
        checks = threading.Thread(target=check_health, args=(over,))
        checks.start()
        try:
            yield found
        except BaseException:
            for service in (*HOSTS, *DOORS, "haproxy", "valkey", "prometheus"):
                done = podman("logs", "--tail", "20", f"antiphon_{service}_1", check=False)
                print(f"--- {service}\n{done.stdout}{done.stderr}", file=sys.stderr)
            raise
        finally:
            over.set()
            checks.join()
            found("down", "--volumes")


def watched(of: Composed) -> dict[str, str]:
    """Return the servers that Prometheus scrapes, each with its state: `up` if it answers."""
    code = "import urllib.request as u; print(u.urlopen('http://prometheus:9090/api/v1/targets').read().decode())"
    found = json.loads(podman("exec", "antiphon_host-2_1", "python3", "-c", code).stdout)
    return {t["labels"]["instance"]: t["health"] for t in found["data"]["activeTargets"]}


async def goes_on(of: Composed) -> None:
    """Kill the host of a conversation. The other host answers the client, which knows nothing of resuming."""
    async with talking(URL, key=KEY, **TEXT) as talk:
        first = await talk.answer("My name is Ada.")
        assert first["status"] == "completed", first
        used = first["usage"]["input_tokens"]
        for host in HOSTS:
            pid = of.state(host)["Pid"]
            assert pid > 0, f"{host} does not run"
            os.kill(pid, signal.SIGKILL)
            begun_s = time.monotonic()
            response = await talk.answer("What is my name?")
            took_s = time.monotonic() - begun_s
            assert response["status"] == "completed", response
            assert response["usage"]["input_tokens"] > used, response["usage"]
            used = response["usage"]["input_tokens"]
            say(f"{host} was killed: {response['output'][0]['content'][0]['text']!r} after {took_s:.1f} s")
            # Docker would restart it, as the file's `restart` says. Podman 4.3 does not restart containers that others
            # depend on.
            begun_s = time.monotonic()
            await asyncio.to_thread(podman, "start", f"antiphon_{host}_1")
            await asyncio.to_thread(wait_for, lambda: all_ready(of))
            say(f"it was started again, and both are ready {time.monotonic() - begun_s:.0f} s later")


def all_ready(of: Composed) -> bool:
    """Return whether both hosts accept sessions."""
    code = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready')"
    done = [podman("exec", f"antiphon_{host}_1", "python3", "-c", code, check=False) for host in HOSTS]
    return not any(one.returncode for one in done)


def main() -> None:
    print("compose", flush=True)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--volume", action="append", default=[])
    volumes = parser.parse_args().volume
    if podman("image", "exists", TAG, check=False).returncode:
        sys.exit("`make image` first: it builds the image")
    build_with(SERVERS, "haproxy redis-server prometheus")
    with composed(volumes) as of:
        begun_s = time.monotonic()
        of("up", "--detach")
        wait_for(lambda: ready(URL))
        say(f"ready {time.monotonic() - begun_s:.0f} s after `up`, the models' volume empty")
        say(f"it transcribes {transcribed(URL)!r}")
        asked = {"input": "a", "model": "tts-1", "voice": "alloy"}
        with httpx.Client(base_url=URL, trust_env=False) as client:
            refused = client.post("/v1/audio/speech", json=asked)
            hidden = [client.get(path).status_code for path in ("/metrics", "/internal/hosts")]
        assert (refused.status_code, hidden) == (401, [404, 404]), (refused, hidden)
        say("without a key it answers 401, and what is internal is not found")
        wait_for(lambda: all_ready(of))
        wait_for(lambda: len(found := watched(of)) >= 4 and set(found.values()) == {"up"})
        say(f"Prometheus reads {', '.join(sorted(watched(of)))}")
        asyncio.run(goes_on(of))
        of("stop")
        ended = {name: of.state(name)["ExitCode"] for name in (*HOSTS, *DOORS)}
        assert set(ended.values()) == {0}, ended
        say("`stop` ended hosts and doors with 0")


if __name__ == "__main__":
    main()
