"""A certificate: how many sessions of each kind a machine was measured to hold, within which objectives. Pure, but for
`read`, which reads a file, and `machine`, which looks at this one.

The file is JSON, versioned. `antiphon certify` writes it, `antiphon serve --certificate` admits by it.
"""

from __future__ import annotations

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
# What a session is for; docs/design/admission.md says which upgrade and which request is which.
Kind = Literal["captions", "conversation", "speech", "video", "duplex"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# The load up to which kinds are mixed where no mixture was measured.
DEFAULT_MIXED = 0.85


class Objective(msgspec.Struct, frozen=True):
    """What sessions are held within: the 95th percentile of their delay, in seconds. A failed turn's has no end.

    `delay`: what is measured, in words.
    """

    p95_s: float
    delay: str


class Step(msgspec.Struct, frozen=True):
    """What so many sessions at once were measured to get. Delays are in seconds; None where no turn came to its end.

    `turns` were counted. `failed`: turns that had no answer, or an error, or late sound. `met`: the objective.
    """

    sessions: int
    turns: int
    failed: int
    p50_s: float | None
    p95_s: float | None
    met: bool


class CertifiedKind(msgspec.Struct, frozen=True):
    """`sessions`: how many of the kind alone are held; 0 where not even one is. `curve`: the steps, by sessions.

    `bounded`: the search ended at its own limit, so that more might be held.
    """

    sessions: int
    objective: Objective
    curve: tuple[Step, ...]
    bounded: bool = False


class Mixture(msgspec.Struct, frozen=True):
    """So many sessions of each kind at once, a load of `load`, and what each kind got."""

    sessions: dict[str, int]
    load: float
    steps: dict[str, Step]
    met: bool


class Spread(msgspec.Struct, frozen=True):
    """A delay over so many turns, in seconds; None where none came to its end. `failed`: turns that did not."""

    turns: int
    failed: int
    p50_s: float | None
    p95_s: float | None


class Part(msgspec.Struct, frozen=True):
    """How many of so many; `part`: as a fraction, None of none."""

    count: int
    of: int
    part: float | None


class SingleCallerFigures(msgspec.Struct, frozen=True):
    """What one caller alone was measured to get. None: the server does not do it, or not in a way that could be seen.

    - `first_words`: from the true beginning of speech to its first transcribed text.
    - `finals`: from the true end of speech to its last final transcript.
    - `word_errors`: substituted, left out and added words, of those that were said.
    - `voice_to_voice`: from the true end of a question to the first sound of its answer that is no silence.
    - `pauses_taken_over`: questions with a pause of 1 s in their middle that were answered before their end.
    - `barge_in`: from the true beginning of speech into an answer until the server tells of it.
    - `not_noticed`: of these, those that the server did not tell of within 4 s.
    - `kept_unheard`: of an answer that was cut, the part of its words that the history keeps less the part of its sound
      that was heard: the median. Near 0 is right, near 1: what nobody heard was kept.
    - `errors`: what went wrong, each once.
    """

    first_words: Spread | None = None
    finals: Spread | None = None
    word_errors: Part | None = None
    voice_to_voice: Spread | None = None
    pauses_taken_over: Part | None = None
    barge_in: Spread | None = None
    not_noticed: Part | None = None
    kept_unheard: float | None = None
    errors: tuple[str, ...] = ()


class Machine(TypedDict, total=False):
    """What a certificate says of the machine that it is of: its CPU, the cores that a process may use, and so on."""

    cpu: str
    cores: int
    memory_gb: float
    gpus: list[str]
    python: str


class Given(TypedDict, total=False):
    """What the server was started with."""

    flags: list[str]


# What of a machine may not be another than was certified.
COMPARED: tuple[Literal["cpu", "cores", "gpus"], ...] = ("cpu", "cores", "gpus")


class Certificate(msgspec.Struct, frozen=True):
    """What `antiphon certify` found on a machine, on a day.

    `date`: ISO 8601, UTC. `machine`, `settings`: what it was measured on and with. `models`: the loaded ones. `mixed`:
    the load up to which kinds were measured to be mixed; None where no mixture was. `url`: of a server that was not
    started for it, else "". `alone`: what one caller gets; None where that was not measured.
    """

    version: int
    date: str
    machine: Machine
    models: tuple[str, ...]
    settings: Given
    kinds: dict[str, CertifiedKind]
    mixed: float | None = None
    mixtures: tuple[Mixture, ...] = ()
    url: str = ""
    alone: SingleCallerFigures | None = None

    @property
    def most_mixed(self) -> float:
        """The load that is admitted where kinds are mixed."""
        return DEFAULT_MIXED if self.mixed is None else self.mixed

    def share(self, kind: Kind) -> float | None:
        """The part of the machine that one session of a kind takes; None for a kind that was not certified.

        More than 1 for a kind of which not even one session is held.
        """
        found = self.kinds.get(kind)
        return None if found is None else 1.0 / max(found.sessions, 0.5)


def read(file: Path) -> Certificate:
    """Read a certificate. Raises SettingsError, which names the file, for one that is not there or is none."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Certificate)
    except OSError as error:
        raise SettingsError(f"--certificate: {file}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise SettingsError(f"--certificate: {file} is no certificate: {error}") from None
    if found.version != VERSION:
        raise SettingsError(f"--certificate: {file} is of version {found.version}, and this is {VERSION}")
    if unknown := set(found.kinds) - set(KINDS):
        raise SettingsError(f"--certificate: {file} has unknown kinds: {', '.join(sorted(unknown))}")
    if not found.kinds or any(k.sessions < 0 for k in found.kinds.values()) or not 0 < found.most_mixed <= 1:
        raise SettingsError(f"--certificate: {file} certifies nothing that can be admitted by")
    return found


def encode(certificate: Certificate) -> bytes:
    """Return a certificate as its file, indented JSON."""
    return msgspec.json.format(msgspec.json.encode(certificate), indent=1) + b"\n"


def load_of(held: Mapping[Kind, int], certificate: Certificate | None, max_sessions: int) -> float:
    """Return what part of the machine so many sessions of each kind take.

    A kind that is not certified counts as a share of `max_sessions`.
    """
    total = 0.0
    for kind, count in held.items():
        share = certificate.share(kind) if certificate else None
        total += count * (share if share is not None else 1.0 / max_sessions)
    return total


# --- this machine -----------------------------------------------------------------------------------------------------


def machine() -> Machine:
    """Return the CPU, the cores that this process may use, memory in GB, and the GPUs by name."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": _gpus(),
        "python": platform.python_version(),
    }


def differs(certified: Machine) -> list[str]:
    """Return what of this machine is another than was certified, of CPU, cores and GPUs."""
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
