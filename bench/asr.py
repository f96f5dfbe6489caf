"""Live transcription of real recordings over real sockets, measured from outside; and transcription of whole files.

    antiphon bench asr [--data DIR] [--sections NAME,NAME]
                       [--kinds K,K] [--languages L,L] [--clips N] [--speed X] [--profile NAME]

Words and times are those that a client sees. The audio is played in real time over the OpenAI transcription session (24
kHz), and times count from the first sample. `speech_start` and `speech_end` in the manifest are the true bounds of the
speech. "Live" text is the finals, "shown" text the joined deltas, and "file" text the result of
`/v1/audio/transcriptions` for the same clip.

--speed plays clips faster than real time in the sections that measure only words: `quality`, `languages`, `ghosts`,
`files`, `keyterms` and `context`. Finals and ghosts (words heard in noise) are then close to those of real time. Shown
words are not: the session decodes fewer partials, so words appear later and are better. The other sections always run
in real time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

from bench.common import Server, machine, numbers, options, save, server
from bench.hearing.beside import beside
from bench.hearing.client import whole_files
from bench.hearing.clips import PAUSE, Clip, loaded, read_manifest, spread, with_data, with_pauses
from bench.hearing.files import SOUNDS, cues, levels, no_speech
from bench.hearing.ghosts import KINDS as GHOST_KINDS
from bench.hearing.ghosts import ghosts
from bench.hearing.latency import latency, plot, streams
from bench.hearing.long_session import long_session
from bench.hearing.options import context, joined, keyterms
from bench.hearing.peers import peers, ratios
from bench.hearing.quality import languages, quality

from antiphon.loading.loader import store_of
from antiphon.settings import load as load_settings
from antiphon.store.registry import profile

TRANSCRIBING = ("quality", "languages", "ghosts", "files", "keyterms", "context", "latency", "streams")
SECTIONS = (*TRANSCRIBING, "long", "beside", "peers")
KINDS = (
    *("asr_read", "asr_nonnative", "asr_noisy", "asr_8k_native", "asr_speech", "asr_short", "asr_spontaneous_min"),
    *("longform", PAUSE),
)
LANGUAGE_KIND = "asr_multilang"
ORDER_KIND, READ_KIND, LONG_KIND = "command_slots", "asr_read", "longform"
# Kinds of recordings into which pauses are inserted. Three clips are made of each.
MADE_CLIPS = 12
# Kinds of recordings for `latency`, `streams`, `long` and `peers`.
PLAIN_KINDS = ("asr_read", "asr_nonnative", "asr_speech")
PLAIN_MAX_S = 25.0
NO_VOICE = ("--language-model", "none", "--synthesizer", "none")


def arguments() -> argparse.Namespace:
    """Parse the command line. `sections` becomes a set."""
    parser = with_data(options("antiphon bench asr", __doc__, SECTIONS))
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of recordings in the quality section")
    parser.add_argument("--languages", default="", help="languages of the languages section; all if empty")
    parser.add_argument("--clips", type=int, default=0, help="most clips of a kind, and in latency and peers (30)")
    parser.add_argument(
        "--speed", type=float, default=1.0, help="speed relative to real time, if only words are measured"
    )
    parser.add_argument("--streams", default="1,5,10,15,20", help="numbers of streams in the streams section")
    parser.add_argument("--load-seconds", type=float, default=60.0, help="seconds for each number of streams")
    parser.add_argument(
        "--beside-seconds", type=float, default=600.0, help="seconds of each part of the beside section"
    )
    parser.add_argument("--cue-minutes", type=float, default=12.0, help="length of the file with pauses")
    parser.add_argument("--ghost-minutes", type=float, default=30.0, help="minutes of noise, live and in one file")
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the long session")
    parser.add_argument(
        "--transcripts", type=Path, help="append the transcripts of each clip to this file (JSON lines)"
    )
    parser.add_argument("--profile", default="default")
    parser.add_argument("--out", type=Path, help="folder of the results, instead of bench/results")
    args = parser.parse_args()
    args.sections = set(args.sections.split(","))
    if unknown := args.sections - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    return args


def judged(args: argparse.Namespace, everything: list[Clip]) -> list[Clip]:
    """Return the clips of the quality section."""
    clips: list[Clip] = []
    for kind in args.kinds.split(","):
        if kind == PAUSE:
            clips += with_pauses(args.data, args.clips or MADE_CLIPS)
        else:
            clips += of_kind(everything, kind, args.clips)
    return clips


def of_kind(everything: list[Clip], kind: str, most: int) -> list[Clip]:
    """Return at most `most` clips of a kind, with their samples; all clips if `most` is 0."""
    return loaded(spread([c for c in everything if c.kind == kind and c.text], most))


def foreign(args: argparse.Namespace, everything: list[Clip]) -> list[Clip]:
    """Return the clips of the languages section, at most --clips of each language."""
    chosen = [c for c in everything if c.kind == LANGUAGE_KIND and c.text]
    wanted = args.languages.split(",") if args.languages else sorted({c.language for c in chosen})
    return loaded(c for name in wanted for c in spread([c for c in chosen if c.language == name], args.clips))


async def transcribe(srv: Server, args: argparse.Namespace, everything: list[Clip], document: dict[str, Any]) -> None:
    """Return the sections that need only a transcribing server."""
    wanted = args.sections
    options = {"speed": args.speed, "transcripts": args.transcripts}
    if "quality" in wanted:
        document["quality"] = await quality(srv, judged(args, everything), **options)
    if "languages" in wanted:
        document["languages"] = await languages(srv, foreign(args, everything), **options)
    if "ghosts" in wanted:
        noise = loaded(c for c in everything if c.kind in GHOST_KINDS)
        document["ghosts"] = await ghosts(srv, noise, args.ghost_minutes, args.speed)
    if "files" in wanted:
        clips, sounds = plain(everything), [c for c in everything if c.kind in GHOST_KINDS]
        document["levels"] = await levels(srv, spread(clips, args.clips or 40), speed=args.speed)
        document["cues"] = await cues(srv, spread(clips, 12), args.cue_minutes)
        document["no_speech"] = await no_speech(srv, loaded(spread(sounds, SOUNDS * len(GHOST_KINDS))))
    if "keyterms" in wanted:
        orders = loaded(spread([c for c in everything if c.kind == ORDER_KIND and c.terms], args.clips))
        if orders:
            others = of_kind(everything, READ_KIND, args.clips)
            document["keyterms"] = await keyterms(srv, orders, others, speed=args.speed)
    if "context" in wanted:
        clips = of_kind(everything, LONG_KIND, args.clips)
        clips += joined(of_kind([c for c in everything if c.language == "en"], READ_KIND, args.clips))
        if clips:
            document["context"] = await context(srv, clips, **options)
    if wanted & {"latency", "peers"}:
        some = spread(plain(everything), args.clips or 30)
        files = await whole_files(srv, some, word_times=True)
        document["latency"] = await latency(srv, some, files)
    if "streams" in wanted:
        clips = plain(everything)
        files = await whole_files(srv, clips)
        document["streams"] = await streams(srv, clips, files, numbers(args.streams), args.load_seconds)


def plain(everything: list[Clip]) -> list[Clip]:
    """Return English sentences of ordinary length."""
    return loaded(
        c for c in everything if c.kind in PLAIN_KINDS and c.language == "en" and c.text and c.seconds < PLAIN_MAX_S
    )


def compare(args: argparse.Namespace, everything: list[Clip], document: dict[str, Any]) -> None:
    """Measure the peers, and print them next to the `latency` of this run."""
    settings = load_settings({"profile": args.profile}, os.environ)
    whisper = next(m for m in profile(args.profile) if m.role == "transcriber")
    some = spread(plain(everything), args.clips or 30)
    document["peers"] = peers(some, store_of(settings.models).require(whisper))
    ratios(document["latency"]["default (200 ms)"], document["peers"])


def main() -> None:
    args = arguments()
    everything = read_manifest(args.data)
    document: dict[str, Any] = {"machine": machine(), "profile": args.profile, "data": args.data.name}
    chosen = ("--profile", args.profile)
    if args.sections & {*TRANSCRIBING, "peers"}:
        with server(*chosen, *NO_VOICE) as srv:
            asyncio.run(transcribe(srv, args, everything, document))
    if "long" in args.sections:
        with server(*chosen, *NO_VOICE, "--session-s", "0") as srv:
            document["long"] = asyncio.run(long_session(srv, plain(everything), args.minutes))
    if "beside" in args.sections:
        with server(*chosen, *NO_VOICE, "--headroom") as srv:
            document["beside"] = asyncio.run(beside(srv, plain(everything), args.beside_seconds))
    if "peers" in args.sections:
        compare(args, everything, document)
    name = "asr" if args.profile == "default" else f"asr-{args.profile}"
    path = save(name, document, *([args.out] if args.out else []))
    plot(json.loads(path.read_text()), path.parent)
    print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
