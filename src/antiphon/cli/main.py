"""Runs the commands of the command line. The only module that configures logging and reads the environment.

Each command imports what it needs when it runs, so that the other commands start fast.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from antiphon.cli.arguments import BENCHMARKS, argument_parser, meant
from antiphon.errors import AntiphonError, SettingsError, StoreError
from antiphon.settings import Settings, load, options

if TYPE_CHECKING:
    from antiphon.cli.say import SayRequest


log = logging.getLogger(__name__)

LOG_TEXT = "%(asctime)s %(levelname)-7s %(name)s %(message)s"
# OpenMP threads of a matrix product spin for a tenth of a millisecond before they sleep. If they sleep at once, a step
# of the language model takes 68 ms instead of 49 (112 instead of 62 with eight sessions). OpenMP reads the variable
# when it is first loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")
# The progress bars that `transformers` draws while it loads weights would mix with the lines of a log.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named in `argv` (None: the process's arguments) until it ends.

    Returns the exit status: 0 success, 1 failed with a message, 2 wrong settings, 130 interrupted. Wrong arguments and
    `--help` raise SystemExit, as argparse does.
    """
    if os.getpid() == 1:
        # The kernel drops a signal to a container's first process unless the process handles it. A running server
        # installs its own handler; before that, and in every other command, there is nothing to clean up.
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    parser = argument_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.command != "bench":
        parser.error(f"unrecognized arguments: {' '.join(rest)}{meant(args.command, rest)}")
    status = _status(args, rest)
    if args.command == "serve":
        leave_threads(status)
    return status


def leave_threads(status: int) -> None:
    """Exit the process at once if threads are still running.

    A model's thread that hangs or still loads would keep the interpreter from exiting, or abort it (SIGABRT) while the
    libraries are unloaded.
    """
    if threading.active_count() > 1:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status(args: argparse.Namespace, rest: list[str]) -> int:
    try:
        if args.command == "bench":
            return _bench(args.name, rest)
        settings = _settings_of(args)
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines() if settings.server.log_format == "json" else logging.Formatter(LOG_TEXT))
        logging.basicConfig(level=settings.server.log_level.upper(), handlers=[handler])
        # Some of these libraries log the URLs and headers of clients, which may have their keys. Sessions log their own
        # start and end.
        for name in ("aioice", "aiortc", "httpx", "faster_whisper", "uvicorn", "websockets"):
            logging.getLogger(name).setLevel(logging.WARNING)
        return RUN[args.command](settings, args)
    except SettingsError as error:
        print(f"antiphon: {error}", file=sys.stderr)
        return 2
    except AntiphonError as error:
        print(f"antiphon: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The program that reads our output closed the pipe, as `head` does. This is not a failure.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class JsonLines(logging.Formatter):
    """Formats each record as a JSON object on one line: `time` (UTC), `level`, `logger`, `message`, and its fields.

    `traceback` has the traceback, if there is one. Records about requests and sessions have two attributes: `event`
    becomes `message`, and `fields` become members of the object.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without a newline. Non-ASCII characters are escaped, so that no text can add a line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": getattr(record, "event", None) or record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(getattr(record, "fields", {}) | line)


def _settings_of(args: argparse.Namespace) -> Settings:
    names = {o.name for o in options()}
    flags = {k: v for k, v in vars(args).items() if k in names}
    return load(flags, os.environ, args.config)


def _serve(settings: Settings, args: argparse.Namespace) -> int:
    if settings.cluster.role == "door":
        return _serve_door(settings)
    from antiphon.cli.preparation import prepare_to_serve
    from antiphon.server.http.listening import bind
    from antiphon.server.http.tls import described, open_tls
    from antiphon.server.run import check_exposure, serve

    check_exposure(settings)
    # Checked before models are fetched; the server opens it again.
    tls = open_tls(settings)
    if args.ray and tls:
        raise SettingsError("--ray serves without TLS: a proxy in front of it has to end TLS (docs/design/ray.md)")
    serve_here = load_ray_serve() if args.ray else None
    with bind(settings.server.host, settings.server.port) as bound:
        if serve_here:
            # Ray binds the port again; this only checks that it is free before models are fetched.
            bound.close()
        settings = prepare_to_serve(settings, fetches=not args.no_pull)
        if serve_here:
            return _serve_ray(serve_here, settings, args)

        def ready(url: str) -> None:
            key = ' -H "authorization: Bearer KEY"' if settings.server.api_keys else ""
            print(f"\n  antiphon is ready at {url}", flush=True)
            trust = ""
            if tls:
                lines, url, trust = described(tls, settings.server, url)
                print("".join(f"  {line}\n" for line in lines), end="", flush=True)
            print(f"  try it:  open {url}/ in a browser, or hand it a recording:", flush=True)
            request = f"{url}/v1/audio/transcriptions{key}{trust} -F model=default -F file=@FILE"
            print(f"           curl {request}\n", flush=True)

        anyio.run(serve, settings, ready, bound)
    return 0


def _serve_door(settings: Settings) -> int:
    from antiphon.server.door import serve_door
    from antiphon.server.http.tls import described, open_tls

    tls = open_tls(settings)

    def ready(url: str) -> None:
        behind = ", ".join(settings.cluster.hosts) or "the hosts of its store"
        lines = described(tls, settings.server, url)[0] if tls else []
        print(f"\n  antiphon's door is ready at {url} in front of {behind}", flush=True)
        print("".join(f"  {line}\n" for line in lines), flush=True)

    anyio.run(serve_door, settings, ready)
    return 0


def load_ray_serve() -> Callable[..., None]:
    """Return the function that runs the server on Ray. Raises SettingsError if Ray is not installed."""
    from antiphon.cluster.ray_loopback import listen_on_loopback

    # Sets environment variables that Ray reads when it is imported.
    listen_on_loopback()
    try:
        from antiphon.cluster.ray_app import serve_here
    except ModuleNotFoundError as error:
        raise SettingsError(f"--ray needs Ray Serve ({error}): pip install '.[ray]'") from None
    return serve_here


def _serve_ray(serve_here: Callable[..., None], settings: Settings, args: argparse.Namespace) -> int:
    from antiphon.cluster.autoscaling import ScalingRules

    def ready(url: str) -> None:
        print(f"\n  antiphon is ready at {url}   (on Ray Serve)\n", flush=True)

    serve_here(settings, ScalingRules(args.ray_hosts, max(args.ray_hosts, args.ray_most)), args.ray_doors, ready)
    return 0


def _pull(settings: Settings, args: argparse.Namespace) -> int:
    from antiphon.cli.inspection import release_lines
    from antiphon.cli.preparation import (
        check_extras,
        check_home,
        check_names,
        fetch_models,
        registered,
        store_for,
        with_profile,
    )
    from antiphon.loading.loader import prepare
    from antiphon.loading.selection import local_models
    from antiphon.store.registry import MODELS, PROFILES

    if args.list and args.models:
        raise SettingsError("pull: either --list, or the names of models")
    check_home(settings, create=not args.list)
    if not args.list:
        # Does not check the device: an image may be built on a machine without it.
        check_names(settings)
        if not args.models:
            settings = with_profile(settings)
            check_extras(settings)
        named = [registered(name) for name in dict.fromkeys(args.models)]
        wanted_models = named or local_models(settings)
        fetch_models(settings, wanted_models)
        store = store_for(settings)
        for wanted in wanted_models:
            print(f"{wanted.id:28} {prepare(settings, store, wanted)}")
        return 0
    store = store_for(settings)
    for model in MODELS.values():
        state = "missing" if (gaps := store.missing(model)) else "here"
        if gaps and len(gaps) < len(model.files):
            state = f"incomplete: {', '.join(f.name for f in gaps)}"
        profiles = ", ".join(name for name, models in PROFILES.items() if model in models)
        print(f"{model.id:28} {model.role:12} {model.size / 1e6:7.1f} MB  {model.licence:10} {profiles:16} {state}")
    print("\n".join(["", "released checkpoints, from the hub only:", *release_lines(settings)]))
    return 0


def _transcribe(settings: Settings, args: argparse.Namespace) -> int:
    from antiphon.cli.preparation import fetch_checked
    from antiphon.cli.transcribe import (
        DEFAULT_SPEAKER_MODEL,
        OutputStyle,
        TranscriptRequest,
        check_source,
        transcribe_file,
    )

    style = OutputStyle.JSON if args.json else OutputStyle.SRT if args.srt else OutputStyle.TEXT
    request = TranscriptRequest(args.file, args.language, args.prompt, style, args.speakers, args.channels)
    check_source(request)
    if args.speakers and not settings.models.speaker_model:
        settings = replace(settings, models=replace(settings.models, speaker_model=DEFAULT_SPEAKER_MODEL))
    fetch_checked(settings, request.roles)
    anyio.run(transcribe_file, settings, request)
    return 0


def _say(settings: Settings, args: argparse.Namespace) -> int:
    from antiphon.cli.say import SayRequest

    request = SayRequest(args.text, args.output, args.play, args.speak_as, args.speed, args.seed, args.words)
    return _speak(settings, request)


def _speak(settings: Settings, request: SayRequest) -> int:
    from antiphon.cli.preparation import check_extras, check_names, fetch_checked
    from antiphon.cli.say import check_request, say
    from antiphon.loading.selection import SPEECH_ROLES

    # Check the packages first: if they are missing, that is the more important error than a missing player.
    check_names(settings, SPEECH_ROLES)
    check_extras(settings, SPEECH_ROLES)
    check_request(request)
    fetch_checked(settings, SPEECH_ROLES)
    anyio.run(say, settings, request)
    return 0


def _voices(settings: Settings, args: argparse.Namespace) -> int:
    from antiphon.cli.preparation import fetch_checked
    from antiphon.cli.say import SAMPLE, SayRequest, voice_lines, with_voices
    from antiphon.loading.selection import SPEECH_ROLES

    if args.output and not args.hear:
        raise SettingsError("-o works only with --hear")
    if args.hear:
        settings = with_voices(settings, [args.hear])
        request = SayRequest(SAMPLE.format(name=args.hear), args.output, not args.output, args.hear)
        return _speak(settings, request)
    if args.add:
        fetch_checked(with_voices(settings, [args.add]), SPEECH_ROLES)
    print("\n".join(voice_lines(settings)))
    return 0


def _watch(settings: Settings, args: argparse.Namespace) -> int:
    from antiphon.cli.preparation import fetch_checked
    from antiphon.cli.watch import WatchRequest, check_source, watch
    from antiphon.loading.selection import LANGUAGE_ROLES

    if args.fps <= 0:
        raise SettingsError("--fps must be above 0")
    check_source(args.source)
    settings = fetch_checked(settings, (*LANGUAGE_ROLES, "transcriber"), chooses=True)
    anyio.run(watch, settings, WatchRequest(args.source, tuple(args.ask), args.fps, args.seconds))
    return 0


def _chat(settings: Settings, args: argparse.Namespace) -> int:
    from antiphon.cli.chat import chat
    from antiphon.cli.preparation import fetch_checked
    from antiphon.loading.selection import LANGUAGE_ROLES

    if args.max_tokens is not None and args.max_tokens < 1:
        raise SettingsError("--max-tokens must be at least 1")
    if args.temperature is not None and args.temperature < 0:
        raise SettingsError("--temperature must be at least 0")
    settings = fetch_checked(settings, LANGUAGE_ROLES, chooses=True)
    anyio.run(chat, settings, args.system, args.max_tokens, args.temperature)
    return 0


def _talk(settings: Settings, args: argparse.Namespace) -> int:
    from antiphon.cli.talk import TalkRequest, run
    from antiphon.client.devices import check_sound

    if args.into and args.hear is None:
        raise SettingsError("--into works only with --hear; with a microphone, the loudspeaker plays the responses")
    devices = (args.microphone, args.loudspeaker, args.hear, args.into)
    request = TalkRequest(args.instructions, args.speak_as, *devices, args.ca, args.fingerprint)
    if args.hear is None:
        check_sound()
    # Log lines would mix with the conversation on the screen.
    logging.getLogger().setLevel(logging.WARNING)
    anyio.run(run, settings, request, args.url, args.key or os.environ.get("ANTIPHON_TALK_KEY"))
    return 0


def _replay(settings: Settings, args: argparse.Namespace) -> int:
    if _told_sessions(args.folder):
        return 1
    from antiphon.cli.replay import replay

    return 1 if anyio.run(replay, settings, args.folder) else 0


def _told_sessions(folder: Path) -> bool:
    """Print the recorded sessions in a folder that is not a session itself. Returns False if it has none."""
    from antiphon.recording.tape import sessions_in

    found = [] if (folder / "session.json").exists() else sessions_in(folder)
    if found:
        print(f"antiphon: {folder} holds recorded sessions; name one of them:", file=sys.stderr)
    for session in found:
        when = datetime.fromtimestamp(session.facts.began).astimezone()
        print(f"{session.folder}  {session.facts.id}  {when:%Y-%m-%d %H:%M:%S}  {session.seconds:.1f} s")
    return bool(found)


def _timeline(_: Settings, args: argparse.Namespace) -> int:
    from antiphon.recording.timeline import write_timeline

    if _told_sessions(args.folder):
        return 1
    target = args.output or args.folder / "timeline.html"
    try:
        write_timeline(args.folder, target)
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror}") from error
    print(target)
    return 0


def _doctor(settings: Settings, _: argparse.Namespace) -> int:
    from antiphon.cli.doctor import report
    from antiphon.cli.preparation import check_home, with_profile

    check_home(settings, create=False)
    return anyio.run(report, with_profile(settings))


def _inspect(settings: Settings, args: argparse.Namespace) -> int:
    from antiphon.cli.inspection import run_inspect

    return run_inspect(settings, args.model, as_json=args.json)


def _hosts(settings: Settings, args: argparse.Namespace) -> int:
    from antiphon.cli.hosts import show_hosts

    show_hosts(settings, args.dead)
    return 0


def _top(settings: Settings, args: argparse.Namespace) -> int:
    from antiphon.cli.top import top

    url = args.server or args.url
    top(settings, url, args.every, once=args.once, ca=args.ca, fingerprint=args.fingerprint)
    return 0


def _certify(settings: Settings, args: argparse.Namespace) -> int:
    from antiphon.cli.certify import CertifyOptions, run

    options = CertifyOptions(
        kinds=args.kinds,
        minutes=args.minutes if args.minutes is not None else 0.0 if args.check else 10.0,
        data=args.data,
        out=args.out,
        url=args.url or "",
        key=args.key or os.environ.get("ANTIPHON_CERTIFY_KEY", ""),
        check=args.check,
        serve=args.serve,
        mixed=not args.no_mixture,
        turns_alone=args.turns_alone,
        turn_detection=args.turn_detection,
    )
    return run(options)


def _bench(name: str | None, rest: list[str]) -> int:
    if name is None:
        if not {"-h", "--help"} & set(rest):
            raise SettingsError(f"bench needs the NAME of a benchmark: {', '.join(BENCHMARKS)}")
        print(f"usage: antiphon bench NAME [options]\n\nbenchmarks: {', '.join(BENCHMARKS)}")
        print("\n`antiphon bench NAME --help` shows the options of one.")
        return 0
    root = Path(__file__).resolve().parents[3]
    script = root / "bench" / f"{name}.py"
    if not script.is_file():
        raise SettingsError(
            "bench runs from a checkout of the repository: there is no bench folder next to this installation"
        )
    sys.argv, sys.path = [str(script), *rest], [str(root), *sys.path]
    runpy.run_path(str(script), run_name="__main__")
    return 0


# The function that runs each command. `bench` is not in the table, because it runs before settings are read.
RUN: Mapping[str, Callable[[Settings, argparse.Namespace], int]] = {
    "serve": _serve,
    "pull": _pull,
    "transcribe": _transcribe,
    "say": _say,
    "voices": _voices,
    "watch": _watch,
    "chat": _chat,
    "talk": _talk,
    "replay": _replay,
    "timeline": _timeline,
    "doctor": _doctor,
    "inspect": _inspect,
    "hosts": _hosts,
    "top": _top,
    "certify": _certify,
}


if __name__ == "__main__":
    raise SystemExit(main())
