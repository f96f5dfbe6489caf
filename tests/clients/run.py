"""Third-party clients, each in an environment of its own, against a real server: `make clients`.

    python tests/clients/run.py [NAME…]

An environment is made beside this file from NAME.txt on the first run. A driver prints one line and exits with 0 if its
client was served. The clients of full duplex are driven twice: against the default models, and (`native-NAME`) against
a native model of tiny random weights, which speaks noise. Clients that know nothing of resuming are driven once more
(`door-NAME`) behind a door in front of two hosts: the one that has the session is killed while its first answer sounds.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import wave
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.adapters import tiny_minicpmo
from tests.cluster.processes import Cluster, cluster
from tests.remote.mcp.hand_made import site

from antiphon.audio.containers import decode_all
from antiphon.audio.pcm import Resampler, to_pcm16

HERE = Path(__file__).resolve().parent
DUPLEX = ("duplex", "openbmb", "worker")
SPEECH_TO_SPEECH = ("speech2speech", "soak")
# Clients of the port for Home Assistant.
WYOMING = ("wyoming", "home_assistant", "home_assistant_2026")
UNAWARE = ("agents", "livekit", "pipecat")
# Clients of Deepgram's service: its SDK of today and of a year ago, and plugins.
DEEPGRAM = ("deepgram", "deepgram_2025", "livekit_deepgram", "pipecat_deepgram", "node_deepgram")
# Clients of other hosted services, with plugins for several of them.
HOSTED = (
    *("assemblyai", "cartesia", "livekit_vendors", "pipecat_vendors"),
    *("elevenlabs_agent", "elevenlabs_agent_2025", "node_elevenlabs"),
)
# Clients that always use TLS. Their server has a certificate.
TLS = (
    *("assemblyai_2025", "elevenlabs", "elevenlabs_2025", "node_vendors"),
    *("gemini", "gemini_2025", "gemini_pipecat", "gemini_livekit"),
)
# Clients of OpenAI's Live API.
LIVE = ("openai_live", "live_pipecat")
# Programs in JavaScript. The folder of each has the list of its packages.
NODE = {
    "node": "node/drive.mjs",
    "gemini_node": "node/gemini.mjs",
    "node_deepgram": "node_deepgram/drive.mjs",
    "node_elevenlabs": "node_elevenlabs/drive.mjs",
    "node_vendors": "node_vendors/drive.mjs",
}
NAMES = (
    *UNAWARE,
    "node",
    "gemini_node",
    *DEEPGRAM,
    *HOSTED,
    *LIVE,
    *TLS,
    *SPEECH_TO_SPEECH,
    *WYOMING,
    *DUPLEX,
    *(f"native-{name}" for name in DUPLEX),
    *(f"door-{name}" for name in UNAWARE),
)
# Packages that are installed without their dependencies, because a driver uses a small part of them.
WITHOUT_DEPENDENCIES = {"home_assistant": "homeassistant==2024.3.3", "home_assistant_2026": "homeassistant==2026.2.3"}
# A driver without a client of its own uses another's environment.
ENVIRONMENTS = {
    "worker": "duplex",
    "soak": "duplex",
    "elevenlabs_agent": "elevenlabs",
    "elevenlabs_agent_2025": "elevenlabs_2025",
}
# Versions of a client that are driven alike.
DRIVERS = {
    "assemblyai_2025": "assemblyai",
    "deepgram_2025": "deepgram",
    "elevenlabs_2025": "elevenlabs",
    "elevenlabs_agent_2025": "elevenlabs_agent",
    "gemini_2025": "gemini",
    "home_assistant_2026": "home_assistant",
}
# The Python of clients that need another one.
PYTHONS = {"home_assistant_2026": "3.13"}
LIMIT_S, SOAK_S = int(os.environ.get("LIMIT_S", "180")), 900
RECORDING = HERE.parent / "data" / "audio"


def environment(name: str, here: Path = HERE) -> Path:
    """The interpreter of a client's environment in `here`, which is replaced when its list has changed."""
    listed = here / f"{name}.txt"
    folder = here / f".venv-{name}"
    digest = hashlib.sha256(listed.read_bytes()).hexdigest()
    stamp = folder / ".done"
    if not stamp.is_file() or stamp.read_text() != digest:
        python = interpreter(PYTHONS[name]) if name in PYTHONS else sys.executable
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        install = [folder / "bin" / "pip", "install", "-q"]
        subprocess.run([*install, "-r", listed], check=True)
        if package := WITHOUT_DEPENDENCIES.get(name):
            # It asks for the newest patch version of Python.
            subprocess.run([*install, "--no-deps", "--ignore-requires-python", package], check=True)
        stamp.write_text(digest)
    return folder / "bin" / "python"


def interpreter(version: str) -> Path:
    """The Python of this version, on the path or of pyenv."""
    on_path = shutil.which(f"python{version}")
    for path in (on_path, *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))):
        # pyenv has a command for each version, which fails if the version is not chosen.
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return Path(path)
    raise SystemExit(f"Python {version} is needed, and not found")


def command(name: str) -> list[str | Path]:
    """The command that drives a client, without its arguments. Node's packages are installed when their list is new."""
    if name not in NODE:
        name = name.removeprefix("native-").removeprefix("door-")
        return [environment(ENVIRONMENTS.get(name, name)), HERE / f"drive_{DRIVERS.get(name, name)}.py"]
    folder = (HERE / NODE[name]).parent
    stamp, listed = folder / "node_modules" / ".done", (folder / "package-lock.json").read_text()
    if not stamp.is_file() or stamp.read_text() != listed:
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"], cwd=folder, check=True)
        stamp.write_text(listed)
    return ["node", HERE / NODE[name]]


def started(*flags: str | Path) -> tuple[subprocess.Popen[str], str]:
    """Start a server with the default models, or those of `flags`; return it and its URL once it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "antiphon", "serve", "--port", "0", *flags],
        stdout=subprocess.PIPE,
        text=True,
        env={"ANTIPHON_PROFILE": "default"} | os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert process.stdout
    return process, next(found[1] for line in process.stdout if (found := re.search(r"ready at (\S+)", line)))


@contextmanager
def server(*flags: str | Path) -> Iterator[str]:
    """Yield the URL of such a server, and stop it afterwards."""
    process, url = started(*flags)
    try:
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@contextmanager
def hosts_behind_a_door() -> Iterator[str]:
    """Yield the URL of a door in front of two hosts with the default models. Whichever first speaks an answer is killed
    then; nobody but the hosts' own store says so.
    """
    with cluster("", num_hosts=0) as hosts:
        os.environ.setdefault("ANTIPHON_PROFILE", "default")
        for _ in range(2):
            hosts.add_host(module=("antiphon", "serve"))
        for host in hosts.hosts:
            host.wait()
        door = hosts.add_door()
        door.wait()
        over = threading.Event()
        killer = threading.Thread(target=_kill_who_speaks, args=(hosts, over))
        killer.start()
        try:
            yield door.url
        finally:
            over.set()
            killer.join()
        assert [host.popen for host in hosts.hosts].count(None) == 1, "no host has spoken"


def _kill_who_speaks(hosts: Cluster, over: threading.Event) -> None:
    while not over.wait(0.02):
        for host in hosts.hosts:
            if host.metric('antiphon_latency_seconds_count{kind="first_answer_sound"}'):
                # What was sent first is on its way.
                time.sleep(0.1)
                host.kill()
                print(f"{host.name} is killed", flush=True)
                return


def _wav(recording: Path, folder: Path) -> Path:
    """The recording as PCM16 at 24 kHz: Node reads no FLAC."""
    path = folder / "recording.wav"
    resampler = Resampler(16_000, 24_000)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(24_000)
        file.writeframes(to_pcm16(np.concatenate((resampler.feed(decode_all(str(recording))), resampler.flush()))))
    return path


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for loopback, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    subprocess.run([*made, *subject, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def drive(names: Sequence[str], url: str, folder: Path, port: int = 0, trusts: Path | None = None) -> int:
    """Run the drivers of these clients against a server, and return how many failed. `port` is its Wyoming port.

    `trusts` is the server's certificate.
    """
    recording = next(p for p in sorted(RECORDING.iterdir()) if p.name.startswith("lj-LJ001-0008"))
    failed = 0
    for name in names:
        sound = _wav(recording, folder) if name in NODE else recording
        where = f"tcp://127.0.0.1:{port}" if name in WYOMING else url
        try:
            code = subprocess.run(
                [*command(name), where, sound],
                timeout=SOAK_S if name == "soak" else LIMIT_S,
                check=False,
                env=os.environ | ({"SSL_CERT_FILE": str(trusts), "NODE_EXTRA_CA_CERTS": str(trusts)} if trusts else {}),
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
        print(f"{name}: {'served' if code == 0 else f'FAILED ({code})'}", flush=True)
        failed += code != 0
    return failed


def free_port() -> int:
    """A TCP port of loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def main() -> int:
    names = sys.argv[1:] or NAMES
    for name in names:
        command(name)
    native = [name for name in names if name.startswith("native-")]
    behind = [name for name in names if name.startswith("door-")]
    secure = [name for name in names if name in TLS]
    others = [name for name in names if name not in (*native, *behind, *secure)]
    failed = 0
    with tempfile.TemporaryDirectory() as made, site("delete") as tools:
        folder = Path(made)
        # Drivers of clients that name a tool server read its URL here.
        os.environ["MCP_URL"] = tools.url
        if others:
            port = free_port()
            allowed = ("--mcp-from-clients", f"127.0.0.1:{tools.port}")
            with server("--wyoming", f"127.0.0.1:{port}", *allowed) as url:
                failed += drive(others, url, folder, port)
        if secure:
            cert, key = certificate(folder)
            with server("--tls-cert", cert, "--tls-key", key) as url:
                failed += drive(secure, url, folder, trusts=cert)
        if native:
            model = tiny_minicpmo.write(folder, voice=True)
            with server("--conversation-model", model, "--weights", "fp32") as url:
                failed += drive(native, url, folder)
        for name in behind:
            with hosts_behind_a_door() as url:
                failed += drive([name], url, folder)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
