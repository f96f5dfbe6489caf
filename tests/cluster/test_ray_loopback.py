"""Ray's ports stay on loopback, as far as this can be tested without Ray. `make ray` checks every port."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from antiphon.cluster import ray_loopback
from antiphon.cluster.ray_loopback import BINARY, SWITCH, keep_replica_on_loopback, write_launcher

CONFIG = """\
frontend prometheus
    bind :9101
frontend http_frontend
    bind 127.0.0.1:8000
    bind 127.0.0.1:80001
    bind *:84040
listen stats
  bind *:8404
  stats uri /stats
"""


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("127.0.0.1", "127.0.0.1:8000"),
        ("localhost", "127.0.0.1:8000"),
        ("0.0.0.0", "0.0.0.0:8000"),
        ("192.0.2.7", "127.0.0.1:8000,192.0.2.7:8000"),
        ("::", "0.0.0.0:8000,[::]:8000"),
        ("fd00::2", "127.0.0.1:8000,[fd00::2]:8000"),
    ],
)
def test_haproxy_has_its_statistics_and_metrics_on_loopback_and_the_doors_where_they_are_asked_for(
    tmp_path: Path, host: str, addresses: str
) -> None:
    real = tmp_path / "it is here" / "haproxy"
    real.parent.mkdir()
    real.write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@"\n')
    real.chmod(0o700)
    file = tmp_path / "a config.cfg"
    variables = write_launcher(tmp_path, str(real), host, 8000)
    for _ in range(2):  # A reload starts HAProxy with the same file.
        file.write_text(CONFIG)
        command = [variables[BINARY], "-db", "-f", str(file), "-sf", "12"]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        assert said.stdout.splitlines() == [str(real), *command[1:]]
        wanted = CONFIG.replace(" :9101", " 127.0.0.1:9101").replace("*:8404\n", "127.0.0.1:8404\n")
        assert file.read_text() == wanted.replace("127.0.0.1:8000\n", f"{addresses}\n")
    assert Path(variables[BINARY]).stat().st_mode & 0o077 == 0


def test_other_ports_of_haproxy_are_kept_there_too(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text("  bind *:7001\n  bind *:7002\n  bind *:8404\n")
    ports = {"RAY_SERVE_HAPROXY_STATS_PORT": "7001", "RAY_SERVE_HAPROXY_METRICS_PORT": "7002"}
    (binary,) = write_launcher(tmp_path, "/bin/true", "127.0.0.1", 8000).values()
    subprocess.run([binary, "-f", str(file)], env=os.environ | ports, check=True, timeout=30)
    assert file.read_text() == "  bind 127.0.0.1:7001\n  bind 127.0.0.1:7002\n  bind *:8404\n"


def test_the_internal_server_of_a_replica_is_on_loopback() -> None:
    replica = SimpleNamespace(add_port_to_grpc_server=lambda server, address: (server, address))
    keep_replica_on_loopback(replica)
    assert replica.add_port_to_grpc_server("server", "[::]:0") == ("server", "127.0.0.1:0")


@pytest.mark.server
@pytest.mark.parametrize(
    ("given", "expected"), [({}, "0 token"), ({SWITCH: "1", "RAY_AUTH_MODE": "disabled"}, "1 disabled")]
)
def test_the_switch_is_set_before_ray_is_imported(tmp_path: Path, given: dict[str, str], expected: str) -> None:
    """Ray reads the switch only once. A fake package named `ray` prints its value."""
    (tmp_path / "ray").mkdir()
    found = f"os.environ[{SWITCH!r}] + ' ' + os.environ['RAY_AUTH_MODE']"
    (tmp_path / "ray" / "__init__.py").write_text(f"import os\nraise ModuleNotFoundError({found})\n")
    before = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "antiphon", "serve", "--ray", "--port", "0"]
    done = subprocess.run(
        command, env=before | given | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, f"--ray needs Ray Serve ({expected})" in done.stderr) == (2, True), done.stderr


def test_a_ray_of_a_cluster_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    assert not ray_loopback.listens_on_loopback()
    monkeypatch.setenv(SWITCH, "0")
    assert ray_loopback.listens_on_loopback()
