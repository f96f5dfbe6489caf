"""What holds of antiphon on Ray Serve: each check starts Ray, deploys hosts with scripted models, and talks to them.

    python -m tests.ray_serve.checks [CHECK…]      (in the environment of run.py)

Callers are StockCaller: they know nothing of resuming, and raise where an item is missing, double or out of order.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from antiphon.admission.certificate import Certificate, CertifiedKind, Objective, encode
from antiphon.cluster import ray_app
from antiphon.cluster.autoscaling import ScalingRules
from antiphon.settings import Settings, load
from tests.cluster.callers import StockCaller
from tests.store.servers import RedisServer, free_port

SCRIPTED = ("-m", "tests.cluster.scripted_host")
# Seconds: a host that is silent for HOST_TTL_S is dead; a check that takes longer than the other has failed.
TTL_S, LIMIT_S = 2.0, 180.0
PACE_S = 0.02
# Three words are 0.9 s of sound.
HEARD_S = 1.0


def say(text: str) -> None:
    print(f"  {text}", flush=True)


class TimedCaller(StockCaller):
    """Takes turns as somebody who listens: each waits until the last answer was heard. `longest_s`: the longest that
    one was waited for, from the question to the end of its answer.
    """

    longest_s = 0.0

    async def take_turn(self) -> None:
        """Write three words, wait for the answer, and hear it."""
        begun_s = time.monotonic()
        await self.converse(1, spoken=False)
        self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
        await asyncio.sleep(HEARD_S)


class Service:
    """The application on Ray, at `url`. `nodes`: raylets beside the head's; 0: all is on the head."""

    def __init__(self, folder: Path, nodes: int = 0, places: int = 0, **settings: Any) -> None:
        self.port = free_port()
        self.redis: RedisServer | None = None
        self.url, self.ws = f"http://127.0.0.1:{self.port}", f"ws://127.0.0.1:{self.port}"
        state = str(folder / "state")
        if not RedisServer.missing():
            # As on several machines: who is dead is known when its key has run out.
            self.redis = RedisServer()
            self.redis.start()
            state = self.redis.url
        values: dict[str, Any] = {"state": state, "host_ttl_s": TTL_S, "drain_s": 15.0, "grace_s": 30.0}
        if places:
            file = folder / "certificate.json"
            kinds = {"conversation": CertifiedKind(places, Objective(2.0, ""), ())}
            file.write_bytes(encode(Certificate(1, "", {}, (), {}, kinds)))
            values["certificate"] = str(file)
        self.settings: Settings = load(values | settings, {"ANTIPHON_BURST_SESSIONS": "1000"})
        self.cluster: Cluster | None = None
        self.workers: list[Any] = []
        if nodes:
            self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
            self.workers = [self.cluster.add_node(num_cpus=2) for _ in range(nodes)]
            ray.init(address=self.cluster.address, log_to_driver=False)
        else:
            ray.init(include_dashboard=False, num_cpus=8, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": self.port})

    def deploy(self, hosts: int, most: int = 0, doors: int = 0, host_cpus: float = 0.5, **rules: Any) -> float:
        """Deploy this number of hosts, and doors unless it is 0; return the seconds until all of them served."""
        begun_s = time.monotonic()
        rules |= {"fewest": hosts, "most": max(most, hosts)}
        app = ray_app.hosts_application(self.settings, ScalingRules(**rules), host_cpus, 0.0, "127.0.0.1", SCRIPTED)
        serve.run(app, name="hosts", route_prefix=None)
        if doors:
            serve.run(ray_app.doors_application(self.settings, doors), name="doors", route_prefix="/")
        while not ray_app.serves(self.url):
            time.sleep(0.05)
        return time.monotonic() - begun_s

    def num_hosts(self) -> int:
        """How many replicas of hosts run."""
        states = serve.status().applications["hosts"].deployments["hosts"].replica_states
        return states.get("RUNNING", 0)

    def close(self) -> None:
        serve.shutdown()
        ray.shutdown()
        if self.cluster:
            self.cluster.shutdown()
        if self.redis:
            self.redis.close()


@contextmanager
def service(
    nodes: int = 0, places: int = 0, variables: dict[str, str] | None = None, **settings: Any
) -> Iterator[Service]:
    """A Ray with what `ingress_variables` says, or `variables` instead of it, for one check."""
    with tempfile.TemporaryDirectory(prefix="antiphon-ray-") as folder:
        before = dict(os.environ)
        os.environ["ANTIPHON_TEST_PACE_S"] = str(PACE_S)
        of = load({"drain_s": 2.0}, {})
        os.environ |= ray_app.ingress_variables(of) | (variables or {})
        found = Service(Path(folder), nodes, places, **settings)
        try:
            yield found
        finally:
            found.close()
            os.environ.clear()
            os.environ.update(before)


@asynccontextmanager
async def talking(found: Service, count: int) -> AsyncIterator[list[TimedCaller]]:
    """`count` callers that talk while the block runs; none of them may miss anything, or be cut."""
    callers = [TimedCaller(n, [found.ws], n) for n in range(count)]
    over = False

    async def talk(caller: TimedCaller) -> None:
        async with caller.connected():
            while not over:
                await caller.take_turn()
            caller.check()

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        for caller in callers:
            group.create_task(talk(caller))
        await reached(lambda: all(len(caller.said) >= 2 for caller in callers))
        for caller in callers:
            caller.longest_s = 0.0
        yield callers
        said = [len(caller.said) for caller in callers]
        await reached(lambda: all(len(c.said) >= n + 2 for c, n in zip(callers, said, strict=True)))
        over = True


async def reached(true: Callable[[], object]) -> None:
    """Wait until a function returns something true."""
    while not await asyncio.to_thread(true):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def longest(callers: list[TimedCaller]) -> str:
    """The longest that any of them waited for an answer."""
    return f"the longest wait for an answer was {max(caller.longest_s for caller in callers):.2f} s"


def cmdline(process: psutil.Process) -> list[str]:
    """A process's command line; empty where it has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def listening(process: psutil.Process) -> list[Any]:
    """The addresses that a process and all that it has started listen at."""
    found = []
    for one in [process, *process.children(recursive=True)]:
        # Some are there for a moment only.
        with suppress(psutil.NoSuchProcess):
            found += [c.laddr for c in one.net_connections() if c.status == psutil.CONN_LISTEN]
    return found


def processes_of_hosts() -> list[psutil.Process]:
    """The processes that replicas have started."""
    return [p for p in psutil.process_iter(["cmdline"]) if "tests.cluster.scripted_host" in (p.info["cmdline"] or [])]


# --- the checks -------------------------------------------------------------------------------------------------------


def redeploy() -> None:
    """Both hosts are replaced under live conversations."""
    with service() as found:
        took = found.deploy(2, doors=1)
        say(f"two hosts and a door serve {took:.1f} s after they were asked for")

        async def act() -> None:
            async with talking(found, 6) as callers:
                old = {p.pid for p in processes_of_hosts()}
                # Another setting is another version of the deployment.
                found.settings = replace(found.settings, server=replace(found.settings.server, max_sessions=99))
                begun_s = time.monotonic()
                await asyncio.to_thread(found.deploy, 2)
                await reached(lambda: not old & {p.pid for p in processes_of_hosts()})
                say(f"two hosts were replaced under 6 conversations in {time.monotonic() - begun_s:.1f} s")
            say(f"nobody missed anything; {longest(callers)}")

        asyncio.run(act())


def killed() -> None:
    """A replica is killed, with its host; and then a host alone."""
    with service() as found:
        found.deploy(2, doors=1)

        async def act() -> None:
            for what in ("a replica and its host", "a host"):
                async with talking(found, 6) as callers:
                    host = processes_of_hosts()[0]
                    if what != "a host":
                        host.parent().kill()
                    host.kill()
                    begun_s = time.monotonic()
                    await reached(lambda dead=host.pid: dead not in {p.pid for p in processes_of_hosts()})
                    await reached(lambda: found.num_hosts() == 2 and len(processes_of_hosts()) == 2)
                    say(f"{what} was killed, and two ran again after {time.monotonic() - begun_s:.1f} s")
                say(f"nobody missed anything; {longest(callers)}")

        asyncio.run(act())


def scaling() -> None:
    """Hosts by load: one, three, one; nobody is lost."""
    with service(places=4) as found:
        found.deploy(1, most=3, doors=1, spare=0, after_s=2.0)

        async def act() -> None:
            async with talking(found, 2):
                begun_s = time.monotonic()
                # Two of four places are a load of 0.5; eight more are too many for one host and come as there is room.
                waiting = [TimedCaller(n, [found.ws], n) for n in range(10, 16)]
                over = asyncio.Event()

                async def talk(caller: TimedCaller) -> None:
                    while True:
                        try:
                            async with caller.connected():
                                while not over.is_set():
                                    await caller.take_turn()
                                caller.check()
                                return
                        except Exception as error:
                            if "503" not in str(error):
                                raise
                            await asyncio.sleep(0.5)

                tasks = [asyncio.create_task(talk(caller)) for caller in waiting]
                await reached(lambda: found.num_hosts() == 3)
                say(f"three hosts served 8 callers {time.monotonic() - begun_s:.1f} s after 6 more had come than 2")
                await reached(lambda: all(caller.said for caller in waiting))
                over.set()
                await asyncio.gather(*tasks)
                begun_s = time.monotonic()
                await reached(lambda: found.num_hosts() == 1)
                say(f"one host was left {time.monotonic() - begun_s:.1f} s after they had gone, and two callers stayed")

        asyncio.run(act())


def raylets(node: Any) -> set[int]:
    """The processes of a node from which all others of it descend."""
    found = [infos for kind, infos in node.all_processes.items() if "raylet" in kind]
    return {info.process.pid for infos in found for info in infos}


def runs_on(process: psutil.Process, node: Any) -> bool:
    return bool(raylets(node) & {p.pid for p in process.parents()})


def raylet() -> None:
    """One of two machines is gone, with its host. The door is on another, since these callers cannot resume."""
    # Serve prefers what runs on the proxy's own node, by default.
    with service(nodes=2, variables={"RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0"}) as found:
        found.deploy(2, doors=1, host_cpus=1.5)

        async def act() -> None:
            async with talking(found, 6) as callers:
                hosts = {p.pid: p for p in processes_of_hosts()}
                assert len(hosts) == 2
                (door,) = (p for p in psutil.process_iter() if "ServeReplica:doors:" in " ".join(cmdline(p)))
                gone = next(node for node in found.workers if not runs_on(door, node))
                begun_s = time.monotonic()
                lost = [p for p in hosts.values() if runs_on(p, gone)]
                assert len(lost) == 1
                found.cluster.remove_node(gone, allow_graceful=False)  # type: ignore[union-attr]
                for process in lost:
                    process.kill()
                said = [len(caller.said) for caller in callers]
                await reached(lambda: all(len(c.said) >= n + 3 for c, n in zip(callers, said, strict=True)))
                say(f"a raylet and its host were killed; all go on {time.monotonic() - begun_s:.1f} s later")
            say(f"nobody missed anything; {longest(callers)}")

        asyncio.run(act())


def reloads() -> None:
    """Whatever changes routes reloads HAProxy, which cuts older sockets after a while: a short one, and ours."""

    class Other:
        def __call__(self) -> str:
            return "another application of the same Serve"

    other = serve.deployment(Other).bind()
    for hard_stop_s, lives in (("4", False), ("", True)):
        variables = {"RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": hard_stop_s} if hard_stop_s else {}
        with service(variables=variables) as found:
            found.deploy(1, doors=1)

            async def act(found: Service = found, lives: bool = lives, hard_stop_s: str = hard_stop_s) -> None:
                cut = False
                try:
                    async with talking(found, 3):
                        await asyncio.to_thread(serve.run, other, name="other", route_prefix="/other")
                        await asyncio.sleep(8)
                except BaseException:
                    cut = True
                assert cut is not lives, "cut" if cut else "not cut"
                say(
                    f"HAProxy reloaded, hard stop after {hard_stop_s or 'a session'}: {'cut' if cut else 'all talk on'}"
                )

            asyncio.run(act())


@contextmanager
def served(*flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`antiphon serve --ray` with real models, ready: its process and its port. It has to end with 0."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "antiphon", "serve", "--ray", "--port", str(port)),
                *("--profile", "light", "--state", folder, *flags),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        try:
            for line in process.stdout:
                if re.search(r"ready at http://(127\.0\.0\.1|0\.0\.0\.0):\d+ ", line):
                    break
            assert process.poll() is None, "it did not start"
            yield process, port
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def command() -> None:
    """`antiphon serve --ray` on this machine, with a real model, and its end."""
    begun_s = time.monotonic()
    with served("--language-model", "none", "--synthesizer", "none") as (_, port):
        say(f"`antiphon serve --ray` was ready after {time.monotonic() - begun_s:.1f} s")
        file = Path(__file__).parents[1] / "data" / "audio" / "tau2-yes.flac"
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/audio/transcriptions",
            files={"file": (file.name, file.read_bytes())},
            data={"model": "whisper-1"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        say(f"it transcribed {json.loads(answer.text)['text']!r}")


def ports() -> None:
    """Of all ports of `antiphon serve --ray`, other machines reach that of the doors alone, and that only by --host."""
    flags = ("--language-model", "none", "--synthesizer", "none")
    for host, key in (("127.0.0.1", ""), ("0.0.0.0", "secret")):
        with served(*flags, "--host", host, *(("--api-key", key) if key else ())) as (process, port):
            found = listening(psutil.Process(process.pid))
            open_ports = {a.port for a in found if not ip_address(a.ip.removeprefix("::ffff:")).is_loopback}
            assert len(found) > 15, found
            assert open_ports == ({port} if key else set()), found
            say(f"--host {host}: {len(found)} ports listen; beyond loopback: {sorted(open_ports) or 'none'}")


def cost() -> None:
    """CPU seconds for a minute of captions: two hosts, a door and all of Ray, beside one host alone."""
    from bench.haproxy import captioned, used_by_captions

    def by_ray() -> dict[str, float]:
        with served("--ray-hosts", "2") as (process, port):
            return used_by_captions(f"ws://127.0.0.1:{port}", [psutil.Process(process.pid)])

    def alone() -> dict[str, float]:
        return captioned(1)

    for name, run in (("alone", alone), ("by Ray", by_ray), ("by Ray", by_ray), ("alone", alone)):
        found = run()
        say(
            f"{name}: {found['cpu_s_a_session_minute']:.2f} s a session-minute, {found['of_that_idle']:.2f} of them"
            f" while nobody talks, {found['events']} events"
        )


def frames() -> None:
    """What HAProxy, Serve and a door add to a message and its answer.

    50 messages a second on each socket, each answered; and 40 sockets of 50 frames of audio a second, with every tenth
    a message that is answered.
    """
    from bench.common import percentile
    from bench.hosts import round_trips

    for count, stream in ((8, False), (20, False), (8, True), (40, True)):
        with service() as found:
            found.deploy(1, doors=1)
            host = processes_of_hosts()[0]
            (address,) = {c.laddr for c in host.net_connections() if c.status == psutil.CONN_LISTEN}
            times: dict[str, list[float]] = {"straight": [], "by Serve": []}
            # There and back again, as the machine changes.
            for name in ("straight", "by Serve", "by Serve", "straight"):
                ws = found.ws if name == "by Serve" else f"ws://{address.ip}:{address.port}"
                times[name] += asyncio.run(round_trips([f"{ws}/v1/realtime"] * count, audio=stream))
            what = "sockets of audio" if stream else "sockets"
            for name, took in times.items():
                p50, p99 = percentile(took, 50), percentile(took, 99)
                say(f"{count} {what} {name}: p50 / p99 {p50:.2f} / {p99:.2f} ms, {len(took)} round trips")


CHECKS = {check.__name__: check for check in (command, ports, redeploy, killed, scaling, raylet, reloads, frames, cost)}


def main() -> None:
    for name in sys.argv[1:] or CHECKS:
        print(f"{name}: {(CHECKS[name].__doc__ or '').strip()}", flush=True)
        CHECKS[name]()


if __name__ == "__main__":
    main()
