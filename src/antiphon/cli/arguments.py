"""The arguments of every command and their help. Settings become flags here, grouped by section.

Imports nothing slow, so that `antiphon --help` answers at once.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from antiphon.cli.commit import shown_version
from antiphon.settings import Option, options

# The heading of each section of the settings in a command's help.
HEADINGS = {
    "server": "server",
    "tls": "tls (https and wss)",
    "resume": "resume (sessions that outlive their connection)",
    "cluster": "cluster (several processes as one service)",
    "memory": "memory (limits on the data that the server holds for clients)",
    "audio": "audio (the audio that clients send)",
    "models": "models (which are loaded, from where, and on which device)",
    "engine": "engine (language model, conversation model, video model and their KV)",
    "remote": "remote (models on other servers)",
    "speech": "speech (synthesizer, voices and speech streams)",
    "video": "video (video streams)",
    "wyoming": "wyoming (the port for Home Assistant)",
    "tools": "tools (functions that the server carries out)",
    "telephone": "telephone (calls of carriers and switches)",
    "sip": "sip (telephone calls over SIP and RTP)",
}
BENCHMARKS = (
    "asr",
    "engine",
    "engines",
    "tts",
    "piper",
    "speakers",
    "talk",
    "turns",
    "duplex",
    "native",
    "video",
    "qwen3",
    "host",
    "attack",
    "answers",
    "store",
    "hosts",
    "remote",
    "remote_voices",
    "wyoming",
    "tls",
)


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the command line.

    - `help`: its description, in one line.
    - `operands`: the positional arguments in its usage line.
    - `sections`: the sections of the settings that become its flags.
    - `add_arguments`: adds the arguments that are not settings.
    """

    help: str
    operands: str
    sections: tuple[str, ...]
    add_arguments: Callable[[argparse.ArgumentParser], None]


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands.

    Its result has `command`, the command's own arguments, and each setting of the command's sections by name. A setting
    that was not given is None.
    """
    parser = argparse.ArgumentParser(
        prog="antiphon",
        usage="antiphon COMMAND [options]",
        description="Live speech on your own machine.",
        epilog="`antiphon COMMAND --help` shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=shown_version())
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True, prog="antiphon"
    )
    for name, command in COMMANDS.items():
        usage = f"antiphon {name} [options] {command.operands}".rstrip()
        # `bench` passes all its options on, including `--help`.
        description = f"{command.help[0].upper()}{command.help[1:]}."
        own = commands.add_parser(
            name,
            help=command.help,
            usage=usage,
            description=description,
            add_help=name != "bench",
            # With abbreviations, --remote-key would mean --remote-key-file, so a key would be put on a command line.
            allow_abbrev=False,
        )
        command.add_arguments(own)
        if name != "bench":
            _add_settings(own, command.sections)
    return parser


def meant(command: str, unknown: Sequence[str]) -> str:
    """Return a question that suggests the option closest to one of the `unknown` arguments; "" if none is close."""
    parser = argparse.ArgumentParser(add_help=False)
    COMMANDS[command].add_arguments(parser)
    _add_settings(parser, COMMANDS[command].sections)
    known = re.findall(r"--[a-z][a-z-]*", parser.format_usage())
    for given in unknown:
        if given.startswith("--") and (close := get_close_matches(given.partition("=")[0], known, 1, 0.75)):
            return f"; did you mean {close[0]}?"
    return ""


def _add_settings(parser: argparse.ArgumentParser, sections: Sequence[str]) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings (docs/settings.md)")
    for section in sections:
        group = parser.add_argument_group(HEADINGS[section])
        for option in options():
            if option.section == section and not option.check.secret:
                _add_option(group.add_argument, option)


def _add_option(add_argument: Callable[..., object], option: Option) -> None:
    text = option.help.replace("%", "%%")
    if option.type is bool:
        switch = argparse.BooleanOptionalAction
        add_argument(*option.flags, dest=option.name, action=switch, default=None, help=text)
    elif option.type in (int, float, str):
        metavar = option.type.__name__.upper()
        shown = f"{text} [{option.default}]" if option.default != "" else text
        add_argument(*option.flags, dest=option.name, default=None, metavar=metavar, help=shown)
    else:
        add_argument(*option.flags, dest=option.name, action="append", default=None, metavar="TEXT", help=text)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-pull", action="store_true", help="fail if model files are missing instead of fetching them"
    )
    parser.add_argument("--ray", action="store_true", help="run hosts and doors on Ray Serve, on this machine")
    parser.add_argument("--ray-hosts", type=int, default=1, metavar="N", help="with --ray: the least number of hosts")
    parser.add_argument(
        "--ray-most", type=int, default=0, metavar="N", help="with --ray: the most hosts, which are added by load"
    )
    parser.add_argument("--ray-doors", type=int, default=1, metavar="N", help="with --ray: the number of doors")


def _add_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="fetch only these models; --list shows the names")
    parser.add_argument(
        "--list", action="store_true", help="list the models and whether they are downloaded; fetch nothing"
    )


def _add_transcribe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="any audio or video file; - for standard input")
    parser.add_argument("--language", help="ISO 639-1 code; detected if not given")
    parser.add_argument("--prompt", default="", help="names and words to expect")
    parser.add_argument("--json", action="store_true", help="print one JSON object with segments and words")
    parser.add_argument("--srt", action="store_true", help="print subtitles")
    parser.add_argument("--speakers", action="store_true", help="tell who says what, by voice; not for a stream")
    parser.add_argument(
        "--channels",
        choices=("mix", "separate", "auto"),
        default="mix",
        help="mix the channels, or transcribe each one as a speaker; `auto`: if they are a call; not for a stream",
    )


def _add_say(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help="what to say; - for standard input")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="wav, mp3, flac, opus, aac or pcm by its suffix; - for WAV on standard output",
    )
    target.add_argument("--play", action="store_true", help="play the audio; the default without a file")
    parser.add_argument("--speak-as", metavar="VOICE", help="the voice; the first one loaded if not given")
    parser.add_argument("--speed", type=float, default=1.0, help="the speed of speech, from 0.25 to 4")
    parser.add_argument("--seed", type=int, default=None, help="the same seed gives the same samples")
    parser.add_argument("--words", action="store_true", help="print each word's times on standard error")


def _add_voices(parser: argparse.ArgumentParser) -> None:
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--add", metavar="NAME", help="fetch a voice, or `all`; `serve --voice NAME` then loads it")
    target.add_argument("--hear", metavar="NAME", help="play a sample of a voice")
    parser.add_argument("-o", "--output", metavar="FILE", help="with --hear: write a file instead of playing")


def _add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a file, a URL, or a camera (/dev/video0)")
    parser.add_argument("--ask", action="append", required=True, metavar="QUESTION", help="may be given several times")
    parser.add_argument("--fps", type=float, default=1.0, help="frames per second for the model")
    parser.add_argument("--seconds", type=float, default=None, help="how long to watch; the whole file if not given")


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", default="", help="the system prompt")
    parser.add_argument("--max-tokens", type=int, default=None, help="the largest number of tokens in an answer")
    parser.add_argument("--temperature", type=float, default=None, help="0 always chooses the likeliest token")


def _add_talk(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a running server; if not given, one is started for the conversation")
    parser.add_argument("--key", help="the server's API key; ANTIPHON_TALK_KEY keeps it off the command line")
    _add_trust(parser)
    parser.add_argument("--instructions", help="the system prompt")
    parser.add_argument("--speak-as", metavar="VOICE", help="the voice; the first one loaded if not given")
    parser.add_argument("--microphone", metavar="NAME", help="the input device: a part of its name, or its number")
    parser.add_argument("--loudspeaker", metavar="NAME", help="the output device, likewise")
    parser.add_argument(
        "--hear", metavar="FILE", help="use a recording instead of the microphone; end when it is answered"
    )
    parser.add_argument("--into", metavar="FILE", help="with --hear: write a WAV file instead of playing")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a session's folder that serve --record wrote")


def _add_timeline(parser: argparse.ArgumentParser) -> None:
    _add_replay(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the file to write; timeline.html in the folder by default"
    )


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, or a released model's name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dead",
        metavar="NAME",
        help="mark this host as dead now, for a supervisor that saw it end; a name of the list",
    )


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("server", nargs="?", metavar="URL", help="the server (default: http://127.0.0.1:8000)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, likewise")
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between updates (default: 2)")
    parser.add_argument("--once", action="store_true", help="print the figures since the server's start, and exit")
    _add_trust(parser)


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ca", metavar="FILE", help="for https://: the certificates to trust, as a PEM file")
    parser.add_argument(
        "--fingerprint", metavar="SHA256", help="for https://: trust the certificate that antiphon serve printed"
    )


def _add_nothing(parser: argparse.ArgumentParser) -> None:
    return


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", choices=BENCHMARKS, help=", ".join(BENCHMARKS))


def _add_certify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kinds",
        default="",
        help="captions, conversation, speech, video, duplex, native; default: all that the server serves",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="time limit for each kind, without --turns-alone; default: 10, with --check one step",
    )
    parser.add_argument("--data", type=Path, help="folder of recordings with a manifest.jsonl; default: the checkout's")
    parser.add_argument(
        "--out", type=Path, default=Path("certificate.json"), help="the certificate; a page is written next to it"
    )
    parser.add_argument("--url", help="measure a running server, antiphon or another, instead of starting one")
    parser.add_argument("--key", help="the server's API key; ANTIPHON_CERTIFY_KEY keeps it off the command line")
    parser.add_argument("--check", type=Path, metavar="FILE", help="measure a certificate's numbers again")
    parser.add_argument(
        "--turns-alone", type=int, default=20, help="turns of a single caller, measured first (takes minutes); 0: none"
    )
    parser.add_argument(
        "--turn-detection",
        choices=("server_vad", "semantic_vad"),
        default="server_vad",
        help="how the ends of the single caller's turns are found",
    )
    parser.add_argument("--no-mixture", action="store_true", help="do not measure mixtures of kinds")
    parser.add_argument("serve", nargs="*", metavar="FLAG", help="after --: flags of the server that is started")


COMMANDS: Mapping[str, Command] = {
    "serve": Command(
        "start the server",
        "",
        tuple(HEADINGS),
        _add_serve,
    ),
    "pull": Command(
        "fetch the models of a profile, or the named ones",
        "",
        ("models", "engine", "remote", "speech"),
        _add_pull,
    ),
    "transcribe": Command(
        "transcribe a file, or standard input, while it is read", "FILE", ("models", "remote"), _add_transcribe
    ),
    "say": Command("speak a text, or standard input as it arrives", "TEXT", ("models", "speech"), _add_say),
    "voices": Command("list the voices, fetch one, hear one", "", ("models", "speech"), _add_voices),
    "watch": Command(
        "ask about a clip, a camera or a stream", "SOURCE --ask QUESTION", ("models", "engine", "remote"), _add_watch
    ),
    "chat": Command(
        "talk to the language model in the terminal, or answer standard input",
        "",
        ("models", "engine", "remote"),
        _add_chat,
    ),
    "talk": Command(
        "talk with a model, by microphone and loudspeaker",
        "",
        ("audio", "models", "engine", "remote", "speech"),
        _add_talk,
    ),
    "replay": Command(
        "run a recorded session again and print what differs",
        "FOLDER",
        ("audio", "models", "engine", "remote", "speech"),
        _add_replay,
    ),
    "timeline": Command("draw a recorded session as one HTML file", "FOLDER", (), _add_timeline),
    "doctor": Command(
        "show the installed packages, the devices, the models, and how fast the models are",
        "",
        ("models", "engine", "remote", "speech"),
        _add_nothing,
    ),
    "inspect": Command(
        "show what a model's folder is, and whether it loads here; reads no weights", "MODEL", ("models",), _add_inspect
    ),
    "hosts": Command("list the hosts that share a store, or mark one as dead", "", ("resume",), _add_hosts),
    "top": Command("show what a server is doing: sessions, stages, lanes, memory", "[URL]", (), _add_top),
    "certify": Command(
        "measure how many sessions of each kind this machine, or a server, can hold",
        "[-- SERVE FLAGS]",
        (),
        _add_certify,
    ),
    "bench": Command(
        "run a benchmark (from a checkout); arguments are passed to bench/NAME.py", "NAME", (), _add_bench
    ),
}
