"""The files that run antiphon elsewhere (chart, compose file, units, HAProxy's file) use only what antiphon accepts."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError

from antiphon.cli.arguments import argument_parser
from antiphon.server.http.forwarded import TrustedProxies
from antiphon.server.http.tls import read_certificate, self_signed
from antiphon.settings import Settings, load, options

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "chart"
DOCS = DEPLOY.parent / "docs"
KEYS = {"apiKeys": ["secret"], "internalKey": "inner"}
CERTIFIED = {"host": {"certificate": '{"version": 1}'}}
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "hpa": {"autoscaling": {"by": "hpa"}, **CERTIFIED, "networkPolicy": {"from": {"team": "voice"}}},
    "keda": {"autoscaling": {"by": "keda"}, **CERTIFIED, "serviceMonitor": {"enabled": True}},
    "managed": {
        "store": {"url": "postgresql://x"},
        "host": {"certificate": '{"version": 1}', "env": {"ANTIPHON_LANGUAGE_MODEL": "none"}},
    },
    "ingress": {"ingress": {"enabled": True, "host": "voice.example.org", "tlsSecret": "tls"}},
    "secret": {"existingSecret": "mine", "networkPolicy": {"enabled": False}},
}
# Required fields of objects of other operators, as their definitions have them. Kubernetes itself does not know them.
THEIRS = {"ScaledObject": ("scaleTargetRef", "triggers"), "PodMonitor": ("selector", "podMetricsEndpoints")}
SETTINGS = {option.variable for option in options()}


def manifests(values: dict[str, Any]) -> list[dict[str, Any]]:
    rendered = Chart.load(str(CHART)).render(KEYS | values, name="voice", namespace="ns")
    texts = [text for name, text in rendered.items() if name.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


@pytest.mark.parametrize("version", ["1.30", "1.33"])
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_every_manifest_of_the_chart_is_one_that_kubernetes_takes(values: dict[str, Any], version: str) -> None:
    found = manifests(values)
    assert {"StatefulSet", "Deployment", "Service", "PodDisruptionBudget"} <= {one["kind"] for one in found}
    for one in found:
        if one["kind"] in THEIRS:
            assert set(THEIRS[one["kind"]]) <= set(one["spec"]), one
        else:
            kubernetes_validate.validate(one, version, strict=True)


def test_ray_is_given_two_applications_and_what_serve_needs_to_carry_sessions() -> None:
    (one,) = [
        m
        for m in manifests({"mode": "ray", "autoscaling": {"by": "keda", "max": 7}, **CERTIFIED})
        if m["kind"] == "RayService"
    ]
    served = yaml.safe_load(one["spec"]["serveConfigV2"])
    hosts, doors = served["applications"]
    assert (hosts["route_prefix"], doors["route_prefix"]) == (None, "/")
    assert hosts["args"] == {"part": "hosts", "hosts": 2, "most_hosts": 7, "host_cpus": 1.5}
    assert doors["args"] == {"part": "doors", "doors": 2}
    cluster = one["spec"]["rayClusterConfig"]
    pods = [cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]]
    wanted = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure 503"}
    for pod in pods:
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **pod}, "1.33", strict=True)
        given = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
        assert wanted.items() <= given.items()
        assert {name for name in given if name.startswith("ANTIPHON_")} <= SETTINGS
        # HAProxy waits longer than any session lasts, and the pod longer than its hosts drain.
        assert int(given["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > Settings().server.session_s
        assert pod["spec"]["terminationGracePeriodSeconds"] > int(given["ANTIPHON_DRAIN_S"])
    # All hosts and doors fit into the pod; a door takes a tenth of a CPU.
    workers = cluster["workerGroupSpecs"][0]
    cpus = float(pods[1]["spec"]["containers"][0]["resources"]["requests"]["cpu"])
    assert hosts["args"]["host_cpus"] + 0.1 * doors["args"]["doors"] <= cpus
    assert hosts["args"]["hosts"] <= workers["replicas"] <= workers["maxReplicas"]


def test_the_linter_of_charts_finds_nothing_and_a_service_without_keys_is_refused() -> None:
    report = lint(str(CHART), values=KEYS)
    assert not report["errors"]
    assert all(message["severity"] < 2 for message in report["messages"]), report
    with pytest.raises(HelmError, match="open to everybody"):
        Chart.load(str(CHART)).render({}, name="voice", namespace="ns")
    for wrong, says in (
        ({"store": {"valkey": {"enabled": False}}}, "hosts need a store"),
        ({"autoscaling": {"by": "hpa"}}, "autoscaling.by needs host.certificate"),
        ({"existingSecret": "mine", "store": {"url": "redis://x"}}, "leave store.url empty"),
        ({"mode": "ray", "host": {"args": ["--seed", "1"]}}, "host.args are of mode kubernetes"),
    ):
        with pytest.raises(HelmError, match=says):
            Chart.load(str(CHART)).render(KEYS | wrong, name="voice", namespace="ns")
    with pytest.raises(HelmError, match=r"drainSeconds|integer"):
        Chart.load(str(CHART)).render(KEYS | {"host": {"drainSeconds": "long"}}, name="voice", namespace="ns")


def containers(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each container that runs antiphon, with its pod."""
    for one in manifests(values):
        pod = one.get("spec", {}).get("template", {}).get("spec", {}) if one["kind"] != "Service" else {}
        for container in [*pod.get("initContainers", ()), *pod.get("containers", ())]:
            if container["image"].startswith("antiphon"):
                yield container, pod


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_every_container_gets_arguments_and_settings_that_there_are(values: dict[str, Any]) -> None:
    found = list(containers(values))
    assert {container["name"] for container, _ in found} == {"pull", "host", "door"}
    for container, pod in found:
        args = argument_parser().parse_args([str(arg) for arg in container["args"]])
        assert args.command in ("serve", "pull")
        assert {one["name"] for one in container["env"]} <= SETTINGS
        # The pod ends later than its drain, and runs as a user without privileges.
        if args.command == "serve":
            assert pod["terminationGracePeriodSeconds"] > float(args.drain_s)
        # Otherwise, a Service named antiphon would set ANTIPHON_PORT to its own address in every pod of the namespace.
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        claims = {"models"} if container["name"] != "door" else set()
        assert mounts - claims <= {volume["name"] for volume in pod["volumes"]}


def test_selectors_of_the_chart_find_the_pods_that_they_are_for() -> None:
    found = manifests(VALUES["keda"])
    pods = {
        one["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: one["spec"]["template"][
            "metadata"
        ]["labels"]
        for one in found
        if one["kind"] in ("StatefulSet", "Deployment")
    }
    assert set(pods) == {"host", "door", "valkey"}
    for one in found:
        selector = one["spec"].get("selector") or one["spec"].get("podSelector") if "spec" in one else None
        if not selector:
            continue
        labels = selector.get("matchLabels", selector)
        matched = [part for part, has in pods.items() if labels.items() <= has.items()]
        assert matched == [one["metadata"]["name"].removeprefix("voice-")] or one["kind"] in (
            "Service",
            "PodMonitor",
        ), one
        assert matched


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def test_the_compose_file_names_services_volumes_files_and_settings_that_there_are() -> None:
    found = compose()
    services = found["services"]
    assert {"host-1", "host-2", "door-1", "haproxy", "valkey", "postgres", "prometheus", "grafana", "vllm"} <= set(
        services
    )
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in found["volumes"] or (DEPLOY / source).is_file(), volume
        if "build" in service:
            args = argument_parser().parse_args([str(arg) for arg in service["command"]])
            assert set(service.get("environment", ())) <= SETTINGS, name
            assert service["read_only"]
            # The environment if the operator sets only the keys.
            given = {
                k: re.sub(r"\$\{\w+(?::-(.*?)|:\?.*?)\}", r"\1", v) for k, v in service.get("environment", {}).items()
            }
            for key in {"ANTIPHON_API_KEYS", "ANTIPHON_METRICS_KEY"} & set(given):
                assert given[key] == ""
                given[key] = "secret"
            load({}, given)
            if args.command == "serve" and args.drain_s:
                assert float(service["stop_grace_period"].rstrip("s")) > float(args.drain_s)
    assert (DEPLOY / ".." / services["host-1"]["build"]["dockerfile"]).resolve().is_file()


def test_the_server_of_a_house_has_https_and_speaks_wyoming_only_to_the_network_of_the_file() -> None:
    services = compose()["services"]
    home, assistant = services["home"], services["home-assistant"]
    # Neither starts with the other services.
    assert home["profiles"] == assistant["profiles"] == ["home"]
    environment = home["environment"]
    assert environment["ANTIPHON_WYOMING_ALLOW"] == services["host-1"]["environment"]["ANTIPHON_TRUSTED_PROXIES"]
    (published,) = home["ports"]
    assert published.endswith(":8000")
    assert not environment["ANTIPHON_WYOMING"].endswith(":8000")
    assert environment["ANTIPHON_TLS"] == "self-signed"
    # What the page says of names, ports and variables is in the file.
    page = (DOCS / "home.md").read_text()
    port = environment["ANTIPHON_WYOMING"].rpartition(":")[2]
    shown = (published.split(":")[0], assistant["ports"][0].split(":")[0], port, "under the name `home`")
    assert all(text in page for text in shown)
    for variable in re.findall(r"\b([A-Z_]+)=[A-Z]+\b", page):
        assert f"${{{variable}:" in (DEPLOY / "compose.yaml").read_text(), variable


@pytest.mark.parametrize("unit", ["antiphon.service", "antiphon-door.service"])
def test_a_unit_starts_antiphon_with_flags_that_there_are(unit: str) -> None:
    text = (DEPLOY / "systemd" / unit).read_text().replace("\\\n", " ")
    (start,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    command, *arguments = shlex.split(start)
    assert command == "/opt/antiphon/bin/antiphon"
    args = argument_parser().parse_args(arguments)
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    variables = dict(
        pair.split("=") for line in re.findall(r"^Environment=(.*)$", text, re.MULTILINE) for pair in line.split()
    )
    assert set(variables) <= SETTINGS
    assert int(stop_s) > float(args.drain_s or variables.get("ANTIPHON_DRAIN_S", 60))


def test_pages_name_the_file_of_settings_that_the_unit_reads() -> None:
    units = {unit: (DEPLOY / "systemd" / unit).read_text() for unit in ("antiphon.service", "antiphon-door.service")}
    read = {unit: re.findall(r"^EnvironmentFile=(.*)$", text, re.MULTILINE) for unit, text in units.items()}
    pages = {name: (DOCS / name).read_text() for name in ("deploy.md", "hardening.md")}
    for name, text in (pages | units).items():
        assert set(re.findall(r"/etc/antiphon/\w+", text)) <= {file for files in read.values() for file in files}, name
    for page in pages.values():
        assert read["antiphon.service"][0] in page


def test_what_the_shipped_files_write_to_a_disk_is_said_there() -> None:
    for file in ("systemd/antiphon.service", "compose.yaml"):
        lines = (DEPLOY / file).read_text().splitlines()
        (at,) = [k for k, line in enumerate(lines) if re.match(r"(Environment=| +)ANTIPHON_STATE\b", line)]
        assert "what is said in conversations is" in "".join(lines[at - 2 : at]).lower(), file


def test_metrics_have_a_key_which_the_prometheus_of_the_compose_file_gives(tmp_path: Path) -> None:
    services = compose()["services"]
    for name in ("host-1", "host-2", "door-1", "door-2"):
        assert services[name]["environment"]["ANTIPHON_METRICS_KEY"].startswith("${ANTIPHON_METRICS_KEY:?")
    prometheus = services["prometheus"]
    assert prometheus["environment"]["METRICS_KEY"] == services["door-1"]["environment"]["ANTIPHON_METRICS_KEY"]
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    # Run as at the container's start: the key is written to the file, and the command runs.
    file = tmp_path / "metrics-key"
    shell, option, script = prometheus["entrypoint"]
    script = script.replace("$$", "$").replace(job["authorization"]["credentials_file"], str(file))
    begun = [shell, option, script, "echo", *prometheus["command"]]
    done = subprocess.run(begun, env={"METRICS_KEY": "scrape"}, capture_output=True, text=True, timeout=30, check=True)
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("scrape", 0o600)
    assert done.stdout.split() == prometheus["command"]


def test_the_chart_makes_a_key_of_the_metrics_and_gives_it_to_whoever_reads_them() -> None:
    keys = []
    for values in ({"serviceMonitor": {"enabled": True}}, {"metricsKey": "mine"}, {}):
        found = manifests(values)
        (secret,) = [one for one in found if one["kind"] == "Secret"]
        keys.append(secret["stringData"]["metrics-key"])
        reference = {"name": secret["metadata"]["name"], "key": "metrics-key"}
        for container, _ in containers(values):
            given = {e["name"]: e for e in container["env"]}
            if container["name"] != "pull":
                assert given["ANTIPHON_METRICS_KEY"]["valueFrom"] == {"secretKeyRef": reference}
        for monitor in (one for one in found if one["kind"] == "PodMonitor"):
            (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
            assert endpoint["authorization"]["credentials"] == reference
    assert keys[1] == "mine"
    assert all(re.fullmatch(r"\w{32}", key) for key in (keys[0], keys[2]))
    assert keys[0] != keys[2]


def test_hosts_and_doors_are_told_whom_to_believe_for_addresses() -> None:
    found = compose()
    (pool,) = found["networks"]["default"]["ipam"]["config"]
    network = re.sub(r"\$\{\w+:-(.*)\}", r"\1", pool["subnet"])
    for name in ("host-1", "host-2", "door-1", "door-2"):
        assert found["services"][name]["environment"]["ANTIPHON_TRUSTED_PROXIES"] == pool["subnet"], name
    proxies = {
        f"{container['name']} {given['value']}"
        for container, _ in containers({"door": {"trustedProxies": "192.0.2.1"}})
        for given in container["env"]
        if given["name"] == "ANTIPHON_TRUSTED_PROXIES"
    }
    assert "door 192.0.2.1" in proxies
    for given in (network, *(one.split(" ")[1] for one in proxies)):
        assert "203.0.113.9" not in TrustedProxies(given)
    for unit in ("antiphon.service", "antiphon-door.service"):
        assert "\nEnvironment=ANTIPHON_TRUSTED_PROXIES=127.0.0.1\n" in (DEPLOY / "systemd" / unit).read_text()


@pytest.mark.parametrize("unit", ["antiphon.service", "antiphon-door.service"])
def test_systemd_takes_a_unit(unit: str, tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd is not installed")
    file = tmp_path / unit
    # systemd checks that the program exists.
    file.write_text((DEPLOY / "systemd" / unit).read_text().replace("/opt/antiphon/bin/antiphon", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True, timeout=60, check=False
    )
    # Messages about other units, which this unit wants, do not count.
    assert [line for line in done.stderr.splitlines() if unit in line] == []


def test_haproxy_takes_its_file(tmp_path: Path) -> None:
    if not shutil.which("haproxy"):
        pytest.skip("haproxy is not installed")
    file = tmp_path / "haproxy.cfg"
    # The names of the servers cannot be resolved here.
    file.write_text(re.sub(r"( server \S+) \S+", r"\1 127.0.0.1:8000", (DEPLOY / "haproxy.cfg").read_text()))
    done = subprocess.run(["haproxy", "-c", "-f", str(file)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr


def test_the_image_is_made_of_files_that_there_are_and_asks_for_its_health() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (DEPLOY.parent / source).exists()
            assert f"!{source}" in ignored
    assert set(re.findall(r"\b(ANTIPHON_[A-Z_]+)=", text)) <= SETTINGS
    assert re.search(r"^USER 10001", text, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK ", text, re.MULTILINE)
    # The chart has the same ids.
    for kind in ("user", "group"):
        assert re.search(rf"{kind}add .*--[ug]id 10001", text)
    templates = (CHART / "templates" / "_helpers.tpl").read_text()
    assert set(re.findall(r"^(?:runAsUser|runAsGroup|fsGroup): (\d+)", templates, re.MULTILINE)) == {"10001"}


class Answers(BaseHTTPRequestHandler):
    """Answers /health with 200, and any other path with 503."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == self.server.healthy else 503)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("tls", [{}, {"ANTIPHON_TLS": "self-signed"}, {"ANTIPHON_TLS_CERT": "cert.pem"}])
def test_the_health_check_of_the_image_asks_the_port_that_is_set_and_no_proxy(
    tls: dict[str, str], tmp_path: Path
) -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "")
    (command,) = re.findall(r"^HEALTHCHECK .*? CMD (.*)$", text, re.MULTILINE)
    _, *arguments = shlex.split(command)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        if tls:
            made = self_signed(tmp_path, ["localhost"], datetime.now(UTC))
            server.socket = read_certificate(made, made).context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever).start()
        # The proxy does not exist.
        environment = {"ANTIPHON_PORT": str(server.server_port), "http_proxy": "http://127.0.0.1:9"} | tls
        try:
            for server.healthy, expected in (("/health", 0), ("/nothing", 1)):  # type: ignore[attr-defined]
                done = subprocess.run([sys.executable, *arguments], env=environment, timeout=30, check=False)
                assert done.returncode == expected
        finally:
            server.shutdown()
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, timeout=30, check=False)
    assert done.returncode == 1


VERSIONED = re.compile(r"(?P<name>[a-z0-9./-]+):(?P<tag>v?\d+\.\d+(\.\d+)?[a-z0-9.-]*)(@sha256:[0-9a-f]{64})?")
DIGEST = "sha256:" + "a1" * 32


def unversioned(images: Iterable[str]) -> list[str]:
    """Return the images whose tag is not a complete version."""
    return [image for image in images if not VERSIONED.fullmatch(image)]


def named_images() -> dict[str, str]:
    """Return the images of the compose file and the Dockerfile, by the name of the variable that replaces each."""
    found = dict(re.findall(r"\$\{(\w*IMAGE):-([^}]*)\}", (DEPLOY / "compose.yaml").read_text()))
    (found["BASE"],) = re.findall(r"^ARG BASE=(.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    return found


@pytest.mark.parametrize(
    ("image", "versioned"),
    [
        ("haproxy:3.0.11-alpine", True),
        (f"ghcr.example/team/antiphon:0.1.0@{DIGEST}", True),
        ("vllm/vllm-openai:latest", False),
        ("antiphon", False),
        ("postgres:17-alpine", False),
        (f"antiphon@{DIGEST}", False),
        ("antiphon:0.1.0@sha256:abc", False),
    ],
)
def test_an_image_is_versioned_or_not(image: str, versioned: bool) -> None:
    assert unversioned([image]) == ([] if versioned else [image])


def test_every_image_is_named_by_its_whole_version() -> None:
    images = named_images()
    assert not unversioned(images.values())
    for service in compose()["services"].values():
        assert re.fullmatch(r"\$\{\w*IMAGE:-[^}]+\}", service["image"]), service["image"]
    assert images["BASE"] == images["BASE_IMAGE"]
    version = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["version"]
    assert images["IMAGE"] == f"antiphon:{version}"
    froms = re.findall(r"^FROM (\S+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert set(froms) == {"${BASE}", "packages"}
    for page in DOCS.rglob("*.md"):
        assert not re.search(r"[a-z]:latest\b", page.read_text()), page


@pytest.mark.parametrize("mode", ["kubernetes", "ray"])
def test_the_chart_names_images_by_version_and_by_a_digest_that_is_given(mode: str) -> None:
    def images(values: dict[str, Any]) -> set[str]:
        rendered = Chart.load(str(CHART)).render(KEYS | {"mode": mode} | values, name="voice", namespace="ns")
        return set(re.findall(r"^ *(?:- )?image: *(\S+)", "\n".join(rendered.values()), re.MULTILINE))

    plain = images({})
    assert plain == {named_images()["IMAGE"], named_images()["VALKEY_IMAGE"]}
    given = {"image": {"digest": DIGEST}, "store": {"valkey": {"image": f"valkey/valkey:8.1.3@{DIGEST}"}}}
    assert images(given) == {f"{named_images()['IMAGE']}@{DIGEST}", f"valkey/valkey:8.1.3@{DIGEST}"}
    for wrong in (
        {"image": {"tag": "latest"}},
        {"image": {"digest": "sha256:abc"}},
        {"store": {"valkey": {"image": "valkey/valkey"}}},
        {"store": {"valkey": {"image": "valkey/valkey:latest"}}},
        {"store": {"valkey": {"image": "registry.example:5000/valkey"}}},
    ):
        with pytest.raises(HelmError):
            images(wrong)


def built(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with tools that record their arguments, and report the same digest for every image."""
    for name, answer in (("buildah", ""), ("skopeo", variables.pop("answer", DIGEST))):
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\nprintf "%s\\n" "$PWD" "$@" > {tool}.said\necho {answer}\n')
        tool.chmod(0o755)
    tools = {"BUILDAH": str(tmp_path / "buildah"), "SKOPEO": str(tmp_path / "skopeo")}
    environment = {k: v for k, v in os.environ.items() if k not in ("BASE", "TAG")}
    environment |= tools | {"IMAGES": str(tmp_path / "images.lock")} | variables
    command = ["sh", str(DEPLOY / "build.sh"), *arguments]
    return subprocess.run(command, env=environment, timeout=30, check=False, capture_output=True, text=True)


def test_the_script_that_builds_the_image_gives_the_dockerfile_its_base(tmp_path: Path) -> None:
    assert built(tmp_path, "--isolation", "chroot", BASE="some/python:3.12").returncode == 0
    where, *arguments = (tmp_path / "buildah.said").read_text().split()
    assert Path(where, arguments[arguments.index("-f") + 1]) == DEPLOY / "Dockerfile"
    assert "BASE=some/python:3.12" in arguments
    assert arguments[arguments.index("-t") + 1] == named_images()["IMAGE"]
    assert arguments[-3:] == ["--isolation", "chroot", "."]


def test_the_script_writes_digests_and_builds_with_that_of_the_base(tmp_path: Path) -> None:
    assert built(tmp_path, "lock").returncode == 0
    lock = dict(line.split("=", 1) for line in (tmp_path / "images.lock").read_text().splitlines()[1:])
    images = named_images()
    base, ours = images.pop("BASE"), images.pop("IMAGE")
    assert lock == {variable: f"{image}@{DIGEST}" for variable, image in images.items()}
    assert ours.split(":")[0] not in lock
    assert built(tmp_path).returncode == 0
    assert f"BASE={base}@{DIGEST}" in (tmp_path / "buildah.said").read_text().split()
    # A lock of an older base than that of the Dockerfile.
    (tmp_path / "images.lock").write_text(f"BASE_IMAGE=python:3.12.1@{DIGEST}\n")
    (tmp_path / "buildah.said").unlink()
    done = built(tmp_path)
    assert (done.returncode, "build.sh lock" in done.stderr) == (1, True)
    assert not (tmp_path / "buildah.said").exists()


@pytest.mark.parametrize("answer", ["''", "latest", "sha256:abc", "; exit 1"])
def test_the_script_writes_no_file_of_digests_that_lacks_one(answer: str, tmp_path: Path) -> None:
    done = built(tmp_path, "lock", answer=answer)
    assert (done.returncode, "has no digest" in done.stderr) == (1, True)
    assert not list(tmp_path.glob("images.lock*"))
