"""`antiphon certify`: measures how many sessions of each kind this machine, or another server, can hold."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from antiphon.admission.certificate import KINDS, Certificate, Kind, encode, read
from antiphon.certify.certify import TOLERANCE, Certifier, certify, started_server, summary
from antiphon.certify.clients import OBJECTIVES
from antiphon.certify.page import page
from antiphon.certify.recordings import read_recordings
from antiphon.errors import RemoteError, SettingsError

# Timeout of connecting to a server, and of its answer, in seconds.
REACHED_S = 5.0
# The folder of recordings in a checkout.
RECORDINGS = Path(__file__).resolve().parents[3] / "tests" / "data"


@dataclass(frozen=True, slots=True)
class CertifyOptions:
    """The options of `antiphon certify`, from the command line."""

    # The kinds of sessions to measure, separated by commas; "": those that the server serves.
    kinds: str
    # Time limit for each kind, in minutes, not counting `turns_alone`; 0: one step.
    minutes: float
    # The folder of recordings; None: the checkout's.
    data: Path | None
    # The certificate to write. An HTML page and, for a server started here, a log are written next to it.
    out: Path
    # The server to measure; "": start one.
    url: str
    # The server's API key; "": none.
    key: str
    # A certificate whose numbers are measured again; nothing is written then.
    check: Path | None
    # Flags of `antiphon serve` for the server that is started.
    serve: Sequence[str]
    # Whether to measure mixtures of kinds.
    mixed: bool
    # The number of turns of a single caller that are measured first; 0: none.
    turns_alone: int
    # How the ends of that caller's turns are found: `server_vad` or `semantic_vad`.
    turn_detection: str


def run(options: CertifyOptions) -> int:
    """Measure, print each step, and write the certificate and its page. Returns the exit status: 1 if a checked
    certificate no longer holds.

    Raises SettingsError, RemoteError.
    """
    kinds = kinds_of(options.kinds)
    if options.url and options.serve:
        raise SettingsError("--url measures a running server: pass the flags of `serve` when you start that server")
    if options.url:
        _check_reached(options.url)
    before = read(options.check) if options.check else None
    data = options.data or RECORDINGS
    # Check the recordings before a server is started.
    read_recordings(data)
    return asyncio.run(_run(options, kinds, data, before))


def _check_reached(url: str) -> None:
    """Check that a server answers at this URL, with any response. Raises SettingsError for an invalid URL, RemoteError
    if no server answers.
    """
    if not re.match(r"(http|ws)s?://[^/]", url):
        raise SettingsError(f"--url {url}: expected http://HOST:PORT or ws://HOST:PORT")
    try:
        httpx.get(re.sub("^ws", "http", url.rstrip("/")) + "/ready", timeout=REACHED_S, trust_env=False)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise RemoteError(f"--url {url}: no server answers there: {error or type(error).__name__}") from None
    except httpx.InvalidURL as error:
        raise SettingsError(f"--url {url}: {error}") from None
    except httpx.HTTPError:
        # The server accepted the connection; one that only speaks WebSocket may not answer HTTP.
        return


def kinds_of(text: str) -> tuple[Kind, ...]:
    """Parse names of kinds, separated by commas. Raises SettingsError for an unknown name."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := set(names) - set(KINDS):
        raise SettingsError(f"--kinds: there is no {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in names)


async def _run(options: CertifyOptions, kinds: Sequence[Kind], data: Path, before: Certificate | None) -> int:
    def say(line: str) -> None:
        print(line, flush=True)

    async with AsyncExitStack() as stack:
        url = options.url.rstrip("/")
        if not url:
            log = options.out.with_suffix(".log")
            url = await stack.enter_async_context(started_server(options.serve, log))
        objectives = OBJECTIVES
        if before:
            objectives = objectives | {k: before.kinds[k].objective for k in KINDS if k in before.kinds}
        certifier = Certifier(
            url,
            options.key,
            data,
            minutes=options.minutes,
            say=say,
            objectives=objectives,
            turn_detection=options.turn_detection,
        )
        if before:
            return await _check(certifier, before, kinds or tuple(kind for kind in KINDS if kind in before.kinds))
        kinds = kinds or await certifier.kinds()
        found = await certify(
            certifier,
            kinds,
            flags=options.serve,
            url=options.url,
            mixed=options.mixed,
            turns_alone=options.turns_alone,
        )
    try:
        options.out.write_bytes(encode(found))
        options.out.with_suffix(".html").write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--out: {options.out}: {error.strerror}") from None
    for kind, one in found.kinds.items():
        held = next((step for step in one.curve if step.sessions == one.sessions), None)
        units = f", {held.missed} of {held.units} units missed" if held and held.units else ""
        print(f"{kind}: {one.sessions} sessions within {one.objective.p95_s:g} s, {one.objective.delay}{units}")
    if found.mixtures:
        print(f"mixed up to a load of {found.mixed:g}")
    print(f"written: {options.out}, {options.out.with_suffix('.html')}")
    return 0


async def _check(certifier: Certifier, before: Certificate, kinds: Sequence[Kind]) -> int:
    """Measure each certified number again. Returns 1 if one exceeds its objective by more than TOLERANCE, else 0."""
    numbers = {kind: before.kinds[kind].sessions for kind in kinds if kind in before.kinds}
    if not any(numbers.values()):
        raise RemoteError("the certificate has no sessions of these kinds")
    within = True
    for kind, number in numbers.items():
        if number:
            found = await certifier.held(kind, number)
            objective = before.kinds[kind].objective
            is_near = found.p95_s is not None and found.p95_s <= objective.p95_s * (1 + TOLERANCE)
            # Where no turn may exceed the limit, none may in the check.
            within = within and (is_near if objective.allowed else found.met)
            print(summary(f"{kind}, in all", found, ()), flush=True)
    return 0 if within else 1
