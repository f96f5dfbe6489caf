"""The arguments of every command, and their help. Settings become flags here, grouped by their section.

Nothing heavy is imported: `antiphon --help` answers at once.
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
    "resume": "resume (sessions that outlive their connection)",
    "cluster": "cluster (several processes as one service)",
    "memory": "memory (what clients may make the server hold)",
    "audio": "audio (what clients send)",
    "models": "models (which are loaded, from where and on which device)",
    "engine": "engine (language model, conversation model, video model and their KV)",
    "remote": "remote (a language model that another server runs)",
    "speech": "speech (synthesizer, voices and speech streams)",
    "video": "video (video streams)",
}
BENCHMARKS = (
    "asr",
    "engine",
    "engines",
    "tts",
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
)


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the command line.

    - `help`: what it does, in one line.
    - `operands`: what its usage line names besides its options.
    - `sections`: the sections of the settings that are its flags.
    - `add_arguments`: adds the arguments that are its own.
    """

    help: str
    operands: str
    sections: tuple[str, ...]
    add_arguments: Callable[[argparse.ArgumentParser], None]


def argument_parser() -> argparse.ArgumentParser:
    """The parser of all commands. It sets `command`, a command's own arguments, and one attribute for each setting of
    the command's sections, by its name; a setting that was not given is None."""
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
        # `bench` hands all its options on, `--help` too.
        description = f"{command.help[0].upper()}{command.help[1:]}."
        own = commands.add_parser(
            name,
            help=command.help,
            usage=usage,
            description=description,
            add_help=name != "bench",
            # A key given as --remote-key would be taken for --remote-key-file, and be on a command line.
            allow_abbrev=False,
        )
        command.add_arguments(own)
        if name != "bench":
            _add_settings(own, command.sections)
    return parser


def meant(command: str, unknown: Sequence[str]) -> str:
    """The command's option that is most like one of the `unknown` arguments, as a question; "" where none is."""
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
    parser.add_argument("--ray", action="store_true", help="hosts and doors on Ray Serve, on this machine")
    parser.add_argument("--ray-hosts", type=int, default=1, metavar="N", help="with --ray: hosts, at least")
    parser.add_argument("--ray-most", type=int, default=0, metavar="N", help="with --ray: hosts at most, by their load")
    parser.add_argument("--ray-doors", type=int, default=1, metavar="N", help="with --ray: doors")


def _add_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="fetch these alone, by the names of --list")
    parser.add_argument("--list", action="store_true", help="list the models and what is here, fetch nothing")


def _add_transcribe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="any audio or video file; - for standard input")
    parser.add_argument("--language", help="ISO-639-1; detected if not given")
    parser.add_argument("--prompt", default="", help="names and words to expect")
    parser.add_argument("--json", action="store_true", help="print one JSON object with segments and words")
    parser.add_argument("--srt", action="store_true", help="print subtitles")


def _add_say(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help="what to say; - for standard input")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="wav, mp3, flac, opus, aac or pcm by its name; - for WAV on standard output",
    )
    target.add_argument("--play", action="store_true", help="play it; this is the default without a file")
    parser.add_argument("--speak-as", metavar="VOICE", help="the voice; the first one loaded if not given")
    parser.add_argument("--speed", type=float, default=1.0, help="0.25 to 4")
    parser.add_argument("--seed", type=int, default=None, help="the same seed gives the same samples")
    parser.add_argument("--words", action="store_true", help="print each word's times, on standard error")


def _add_voices(parser: argparse.ArgumentParser) -> None:
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--add", metavar="NAME", help="fetch a voice, or `all`; `serve --voice NAME` then loads it")
    target.add_argument("--hear", metavar="NAME", help="have a voice say something")
    parser.add_argument("-o", "--output", metavar="FILE", help="with --hear: a file in place of the loudspeaker")


def _add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a file, a URL, or a camera (/dev/video0)")
    parser.add_argument("--ask", action="append", required=True, metavar="QUESTION", help="may be given several times")
    parser.add_argument("--fps", type=float, default=1.0, help="frames shown to the model each second")
    parser.add_argument("--seconds", type=float, default=None, help="how much is watched; all of a file if not given")


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", default="", help="instructions that the model is told first")
    parser.add_argument("--max-tokens", type=int, default=None, help="the most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=None, help="0 always takes the likeliest token")


def _add_talk(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="of a server that runs; without it, one is started for the conversation")
    parser.add_argument("--key", help="its API key; better set ANTIPHON_TALK_KEY")
    parser.add_argument("--instructions", help="what the model is told first")
    parser.add_argument("--speak-as", metavar="VOICE", help="the voice; the first one loaded if not given")
    parser.add_argument("--microphone", metavar="NAME", help="a part of its name, or its number")
    parser.add_argument("--loudspeaker", metavar="NAME", help="the same")
    parser.add_argument(
        "--hear", metavar="FILE", help="a recording in place of the microphone; ends when it is answered"
    )
    parser.add_argument("--into", metavar="FILE", help="with --hear: a WAV file for what would be played")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a session's folder, as serve --record wrote it")


def _add_timeline(parser: argparse.ArgumentParser) -> None:
    _add_replay(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the file; timeline.html in the folder if not given"
    )


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dead", metavar="NAME", help="have this host be dead now, as a supervisor that saw it die; names as listed"
    )


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("server", nargs="?", metavar="URL", help="of the server (default: http://127.0.0.1:8000)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the same")
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between looks (default: 2)")
    parser.add_argument("--once", action="store_true", help="print what was since the server's start, and end")


def _add_nothing(parser: argparse.ArgumentParser) -> None:
    return


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", choices=BENCHMARKS, help=", ".join(BENCHMARKS))


def _add_certify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", default="", help="captions, conversation, speech, video, duplex; default: all")
    parser.add_argument(
        "--minutes",
        type=float,
        help="at most, for each kind, beside --turns-alone; default 10, and with --check one step",
    )
    parser.add_argument("--data", type=Path, help="folder of recordings with a manifest.jsonl; default: the checkout's")
    parser.add_argument("--out", type=Path, default=Path("certificate.json"), help="the certificate; a page beside it")
    parser.add_argument("--url", help="measure the server that runs there, ours or another, and start none")
    parser.add_argument("--key", help="its API key; better set ANTIPHON_CERTIFY_KEY")
    parser.add_argument("--check", type=Path, metavar="FILE", help="try a certificate's numbers once more")
    parser.add_argument(
        "--turns-alone", type=int, default=20, help="of one caller, before all else, some minutes; 0: none"
    )
    parser.add_argument(
        "--turn-detection",
        choices=("server_vad", "semantic_vad"),
        default="server_vad",
        help="how the ends of the one caller's turns are found",
    )
    parser.add_argument("--no-mixture", action="store_true", help="measure no mixture of kinds")
    parser.add_argument("serve", nargs="*", metavar="FLAG", help="behind --: flags of the server that is started")


COMMANDS: Mapping[str, Command] = {
    "serve": Command(
        "start the server",
        "",
        ("server", "resume", "cluster", "memory", "audio", "models", "engine", "remote", "speech", "video"),
        _add_serve,
    ),
    "pull": Command(
        "fetch the models of a profile, or those that are named",
        "",
        ("models", "engine", "remote", "speech"),
        _add_pull,
    ),
    "transcribe": Command(
        "turn a file, or standard input, into text as it is read", "FILE", ("models",), _add_transcribe
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
        "show what is installed, which devices and models there are, and how fast they are",
        "",
        ("models", "engine", "remote", "speech"),
        _add_nothing,
    ),
    "hosts": Command("list the hosts that share a store, or say that one is dead", "", ("resume",), _add_hosts),
    "top": Command("show what a server does now: sessions, stages, lanes, memory", "[URL]", (), _add_top),
    "certify": Command(
        "measure how many sessions of each kind this machine, or a server, holds", "[-- SERVE FLAGS]", (), _add_certify
    ),
    "bench": Command("measure (from a checkout); arguments go to bench/NAME.py", "NAME", (), _add_bench),
}
