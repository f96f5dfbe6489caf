"""A certificate: the measured number of sessions of each kind that a machine holds within its objectives.

Certificates are versioned JSON files. `antiphon certify` writes them, and `antiphon serve --certificate` limits
sessions by them. The module is pure except for `read`, which reads a file, and `machine`, which inspects this machine.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict, get_args

import msgspec

from antiphon.errors import SettingsError

VERSION = 1
# What a session is for. docs/design/admission.md maps WebSocket upgrades and HTTP requests to kinds.
Kind = Literal["captions", "conversation", "speech", "video", "duplex", "native"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Load limit for mixed kinds if no mixture was measured.
DEFAULT_MIXED = 0.85


class Objective(msgspec.Struct, frozen=True):
    """A limit for a kind's delay, in seconds, and the fraction of turns that may exceed it.

    With `allowed` 0.05, the limit is that of the 95th percentile; with 0, of every turn. A failed turn counts as an
    infinite delay. `delay` describes in words what is measured.
    """

    p95_s: float
    delay: str
    allowed: float = 0.05

    def most_over(self, turns: int) -> int:
        """Return how many of `turns` turns may exceed the limit."""
        return turns - math.ceil((1 - self.allowed) * turns)


class Step(msgspec.Struct, frozen=True):
    """The measured result of running a number of sessions at once."""

    # Concurrent sessions of the kind.
    sessions: int
    # Turns that were counted, including failed ones.
    turns: int
    # Turns that had no answer, an error, or late audio.
    failed: int
    # Median delay in seconds; None if more than half of the turns failed or no turn was counted.
    p50_s: float | None
    # 95th percentile of the delay in seconds; None as for `p50_s`.
    p95_s: float | None
    # Whether the delays are within the objective.
    met: bool
    # Units of native sessions that were counted.
    units: int = 0
    # Those of them whose result came too late.
    missed: int = 0


class CertifiedKind(msgspec.Struct, frozen=True):
    """The result for one kind of session.

    `sessions` is the number that the machine holds if no other kind runs; 0 if it does not hold even one. `curve` has
    the measured steps in ascending order of sessions. `bounded` means that the search reached its own limit, so the
    machine may hold more.
    """

    sessions: int
    objective: Objective
    curve: tuple[Step, ...]
    bounded: bool = False


class Mixture(msgspec.Struct, frozen=True):
    """A mixture of kinds that ran at once: the number of sessions and the result by kind, and their total load."""

    sessions: dict[str, int]
    load: float
    steps: dict[str, Step]
    met: bool


class Spread(msgspec.Struct, frozen=True):
    """The median and 95th percentile of a delay over `turns` turns, in seconds; None if all turns failed."""

    turns: int
    failed: int
    p50_s: float | None
    p95_s: float | None


class Part(msgspec.Struct, frozen=True):
    """A count out of `of`. `part` is the fraction, or None if `of` is 0."""

    count: int
    of: int
    part: float | None


class SingleCallerFigures(msgspec.Struct, frozen=True):
    """What a single caller gets from a server. A figure is None if the server does not support or report it."""

    # Delay from the true start of speech to the first transcribed text.
    first_words: Spread | None = None
    # Delay from the true end of speech to the last final transcript.
    finals: Spread | None = None
    # The number of substituted, missing and added words, out of all spoken words.
    word_errors: Part | None = None
    # Delay from the true end of a question to the first audible sound of the answer.
    voice_to_voice: Spread | None = None
    # Questions with a pause of 1 s in the middle that were answered before their end.
    pauses_taken_over: Part | None = None
    # Delay from the true start of speech over an answer to the server's event that reports it.
    barge_in: Spread | None = None
    # Interruptions of an answer that the server did not report within 4 s.
    not_noticed: Part | None = None
    # The median, over all interrupted answers, of the share of words kept in the history minus the share of audio that
    # was heard. About 0 is correct. About 1 means that the history keeps words that the caller never heard.
    kept_unheard: float | None = None
    # Distinct error messages, sorted.
    errors: tuple[str, ...] = ()


class Machine(TypedDict, total=False):
    """The machine that was certified. `cores` counts the cores that the process may use."""

    cpu: str
    cores: int
    memory_gb: float
    gpus: list[str]
    python: str


class Given(TypedDict, total=False):
    """The settings that the certified server was started with."""

    flags: list[str]


# Properties of a machine that have to equal the certified ones.
COMPARED: tuple[Literal["cpu", "cores", "gpus"], ...] = ("cpu", "cores", "gpus")


class Certificate(msgspec.Struct, frozen=True):
    """The result of one run of `antiphon certify`."""

    # Version of the file format; VERSION.
    version: int
    # When the run ended: ISO 8601, UTC.
    date: str
    # The machine that ran the server; empty for a server that was already running.
    machine: Machine
    # Ids of the models that the server had loaded.
    models: tuple[str, ...]
    # The settings that the server was started with.
    settings: Given
    # Results by kind.
    kinds: dict[str, CertifiedKind]
    # Load limit for mixed kinds, in (0, 1]; None if no mixture was measured.
    mixed: float | None = None
    # The mixtures that were tried, in order.
    mixtures: tuple[Mixture, ...] = ()
    # URL of a server that was already running; "" if the run started its own server.
    url: str = ""
    # What a single caller gets; None if not measured.
    alone: SingleCallerFigures | None = None

    @property
    def most_mixed(self) -> float:
        """The load limit if several kinds run at once."""
        return DEFAULT_MIXED if self.mixed is None else self.mixed

    def share(self, kind: Kind) -> float | None:
        """Return the share of the machine that one session of a kind takes; None for a kind that was not certified.

        The share is 2 if the machine does not hold even one session of the kind.
        """
        found = self.kinds.get(kind)
        return None if found is None else 1.0 / max(found.sessions, 0.5)


def read(file: Path) -> Certificate:
    """Read a certificate. Raises SettingsError, which names the file, if the file is missing or not a certificate."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Certificate)
    except OSError as error:
        raise SettingsError(f"--certificate: {file}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise SettingsError(f"--certificate: {file} is not a certificate: {error}") from None
    if found.version != VERSION:
        raise SettingsError(f"--certificate: {file} has version {found.version}; this release reads version {VERSION}")
    if unknown := set(found.kinds) - set(KINDS):
        raise SettingsError(f"--certificate: {file} has unknown kinds: {', '.join(sorted(unknown))}")
    if not found.kinds or any(k.sessions < 0 for k in found.kinds.values()) or not 0 < found.most_mixed <= 1:
        raise SettingsError(f"--certificate: {file} certifies nothing that sessions can be limited by")
    return found


def encode(certificate: Certificate) -> bytes:
    """Return the certificate as the bytes of its file: indented JSON."""
    return msgspec.json.format(msgspec.json.encode(certificate), indent=1) + b"\n"


def load_of(held: Mapping[Kind, int], certificate: Certificate | None, max_sessions: int) -> float:
    """Return the share of the machine that the sessions in `held` take.

    A session of a kind that is not certified takes 1 / `max_sessions`.
    """
    total = 0.0
    for kind, count in held.items():
        share = certificate.share(kind) if certificate else None
        total += count * (share if share is not None else 1.0 / max_sessions)
    return total


# --- this machine -----------------------------------------------------------------------------------------------------


def machine() -> Machine:
    """Return the CPU, the number of cores that this process may use, the memory in GB, and the names of the GPUs."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": _gpus(),
        "python": platform.python_version(),
    }


def differs(certified: Machine) -> list[str]:
    """Return the names in COMPARED whose value on this machine differs from the certified one."""
    if not certified:
        return []
    here = machine()
    return [name for name in COMPARED if name in certified and certified[name] != here[name]]


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
