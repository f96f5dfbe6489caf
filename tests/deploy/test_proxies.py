"""HAProxy's file and the recipes for nginx and Caddy, run by the real programs: they hide the operators' paths."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from antiphon.server.routes.table import ROUTES
from antiphon.transports.paths import FOR_CLIENTS, is_for_clients
from tests.attack.doors import UPGRADE
from tests.cluster import balancer
from tests.cluster.spellings import HIDDEN, SERVED, Echo, ask, echo, is_hidden, spelled
from tests.store.servers import free_port

ROOT = Path(__file__).parents[2]
DOCS, WEB = ROOT / "docs", ROOT / "src" / "antiphon" / "web"
PROBES = ("/health", "/ready")


def recipe(name: str) -> str:
    """Return the first listing below this heading of the hardening page."""
    (found,) = re.findall(rf"^### {name}\n.*?^```\n(.*?)^```", (DOCS / "hardening.md").read_text(), re.M | re.S)
    return str(found)


def haproxy(upstream: Echo, port: int, folder: Path) -> list[str]:
    file = folder / "haproxy.cfg"
    file.write_text(balancer.deployed([upstream.address] * 2, port))
    return ["haproxy", "-db", "-q", "-f", str(file)]


def nginx(upstream: Echo, port: int, folder: Path) -> list[str]:
    text = recipe("nginx").replace("listen 443 ssl;", f"listen 127.0.0.1:{port};")
    text = re.sub(r" *ssl_certificate.*\n", "", text).replace("127.0.0.1:8000", upstream.address)
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi"))
    temporary += f"uwsgi_temp_path {folder}/uwsgi;scgi_temp_path {folder}/scgi;access_log off;"
    file = folder / "nginx.conf"
    file.write_text(f"daemon off;pid {folder}/pid;events {{}}\nhttp {{{temporary}\n{text}}}\n")
    return ["nginx", "-p", str(folder), "-e", "stderr", "-c", str(file)]


def caddy(upstream: Echo, port: int, folder: Path) -> list[str]:
    text = recipe("Caddy").replace("voice.example.org", f"http://:{port}").replace("127.0.0.1:8000", upstream.address)
    file = folder / "Caddyfile"
    file.write_text(f"{{\n    admin off\n    auto_https off\n}}\n{text}")
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(file)]


@contextmanager
def running(command: list[str], port: int, folder: Path) -> Iterator[str]:
    """Yield the URL of a proxy that this command starts, after it answers."""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={"HOME": str(folder), "PATH": "/usr/sbin:/usr/bin"}
        )
    url, end_s = f"http://127.0.0.1:{port}", time.monotonic() + 30
    try:
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < end_s, (folder / "log").read_text()
            try:
                if ask(url, "/ready")[0] == 200:
                    break
            except OSError:
                time.sleep(0.02)
        yield url
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def upstream() -> Iterator[Echo]:
    with echo() as found:
        yield found


@pytest.fixture(scope="module", params=[haproxy, nginx, caddy], ids=["haproxy", "nginx", "caddy"])
def proxy(request: pytest.FixtureRequest, upstream: Echo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    make: Callable[[Echo, int, Path], list[str]] = request.param
    name = make.__name__
    if not shutil.which(name, path="/usr/sbin:/usr/bin:/usr/local/bin"):
        pytest.skip(f"{name} is not installed")
    port, folder = free_port(), tmp_path_factory.mktemp(name)
    with running(make(upstream, port, folder), port, folder) as url:
        yield url


@pytest.fixture(autouse=True)
def _forget(upstream: Echo) -> None:
    upstream.seen.clear()


def asked(upstream: Echo) -> list[str]:
    """Return the requests that the upstream got, without HAProxy's health checks."""
    return [target for target, headers, _ in upstream.seen if "host" in headers]


@pytest.mark.parametrize("hidden", HIDDEN)
def test_what_is_hidden_comes_through_in_no_spelling(proxy: str, upstream: Echo, hidden: str) -> None:
    for name, target in spelled(hidden).items():
        for headers in ({}, UPGRADE):
            status, _ = ask(proxy, target, headers=headers)
            assert not [seen for seen in asked(upstream) if is_hidden(seen)], name
            # Without asking the upstream, the proxy only refuses, except that Caddy may redirect to another spelling of
            # a path.
            assert status in (0, 301, 308, 400, 404, 414) or asked(upstream), (name, status)
            upstream.seen.clear()


@pytest.mark.parametrize("target", [*SERVED, *PROBES])
def test_what_clients_ask_for_comes_through_as_it_is(proxy: str, upstream: Echo, target: str) -> None:
    assert ask(proxy, target)[0] == 200
    # A host merges the repeated slashes before and after /v1/.
    assert asked(upstream) == [target]


def test_a_client_does_not_choose_its_address(proxy: str, upstream: Echo) -> None:
    said = {"X-Forwarded-For": "192.0.2.66", "X-Forwarded-Proto": "https"}
    for headers in ({}, UPGRADE):
        ask(proxy, "/v1/realtime", headers=said | headers)
    found = [(h["x-forwarded-for"], h["x-forwarded-proto"]) for _, h, _ in upstream.seen if "host" in h]
    assert found == [("127.0.0.1", "http")] * 2


def test_the_three_have_the_list_and_the_expression_of_the_others() -> None:
    files = {"haproxy": balancer.DEPLOYED.read_text(), "nginx": recipe("nginx"), "caddy": recipe("Caddy")}
    exact = {path for path in FOR_CLIENTS if path == "/" or not path.endswith("/")} | set(PROBES)
    below = {path for path in FOR_CLIENTS if path != "/" and path.endswith("/")}
    (caddy_list,) = re.findall(r"not path (.*)", files["caddy"])
    assert set(caddy_list.split()) == exact | {f"{path}*" for path in below}
    (nginx_list,) = re.findall(r"location ~ (\S+)", files["nginx"])
    paths = {str(getattr(route, "path", "")) for route in ROUTES}
    assert {path for path in paths if re.search(nginx_list, path)} == {
        path for path in paths if path in exact or path.startswith(tuple(below))
    }
    haproxy_lists = re.findall(r"acl for_clients path(\w*) (.*)", files["haproxy"])
    (begins, at_v1, is_one) = (dict(haproxy_lists)[kind] for kind in ("_beg", "_reg", ""))
    assert set(is_one.split()) == exact
    assert {*begins.split(), at_v1.replace("^/+v1/", "/v1/")} == below
    expressions = {name: re.findall(r"\^\[\^\?\]\S*\$\)", text) for name, text in files.items()}
    assert all(len(found) == 1 for found in expressions.values()), expressions
    assert len({found[0] for found in expressions.values()}) == 1


def test_the_page_reads_nothing_that_is_hidden() -> None:
    for script in WEB.glob("*.js"):
        read = {f"/{path}" for path in re.findall(r"""fetch\(["`]([a-z/]+)""", script.read_text())}
        # The page reports it if it cannot read the metrics. Without the other paths it does not work.
        assert all(is_for_clients(path) for path in read - {"/metrics", *PROBES}), script
