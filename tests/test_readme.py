"""The examples of README.md and of the pages for users run as written, against a real server.

The tests change only the server's address. The examples of a page run in order in one folder, because later examples
use files of earlier ones.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import wave
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from antiphon.cli.arguments import COMMANDS, argument_parser
from tests.audio.sound_files import pcm16, wav
from tests.conftest import VOICE, Process, Recording, Serve

ROOT = Path(__file__).parents[1]
LANGUAGE_MODEL = "qwen2.5-coder-0.5b-instruct"
PAGES = ("README.md", "docs/use.md", "docs/client.md", "docs/coming-from.md")
ALL_PAGES = (*PAGES, "CONTRIBUTING.md", "docs/index.md", "docs/measured.md")
CLIENTS = ROOT / "tests" / "clients"
# Each call in a page, with the driver of `make clients` that makes the same call with an unmodified client.
PROVEN = {
    "OpenAIRealtimeLLMService": "drive_pipecat.py",
    "RealtimeModel": "drive_livekit.py",
    "DuplexClient": "drive_duplex.py",
    "run": "drive_agents.py",
    "AsyncDeepgramClient": "drive_deepgram.py",
    "Cartesia": "drive_cartesia.py",
    "Client": "drive_gemini.py",
    "Conversation": "drive_elevenlabs_agent.py",
    "ConversationInitiationData": "drive_elevenlabs_agent.py",
    "ElevenLabs": "drive_elevenlabs.py",
    "ElevenLabsTTSService": "drive_pipecat_vendors.py",
    "GeminiLiveLLMService": "drive_gemini_pipecat.py",
    "OpenAILiveLLMService": "drive_live_pipecat.py",
    "RealTimeTranscriberOptions": "drive_assemblyai.py",
    "TTS": "drive_livekit_vendors.py",
}
# The output of a page's Python examples, and the files that its examples write.
PRINTED = {
    "README.md": ("\n",),
    "docs/use.md": (
        "",
        "capital of France",
        "ask not what your country can do for you",
        "three sentences",
        " ",
        "[resumed] ",
        "",
    ),
    "docs/client.md": ("meeting", "[get_weather: It rains in Paris, 17 degrees.]", "", " ", "your country"),
    "docs/coming-from.md": (" ",),
}
WRITTEN = {
    "README.md": ("question.wav", "answer.wav"),
    "docs/use.md": ("speech.wav", "hello.wav", "hello.mp3", "arrived.wav", "words.wav"),
    "docs/client.md": ("story.wav", "answer.wav"),
    "docs/coming-from.md": (),
}
# The commands that the tests run. All others wait for a camera, for a terminal, or for the end of the server.
RUN = ("say", "transcribe", "chat", "talk")
CURL = shutil.which("curl")
SHELL = (
    f'antiphon() {{ {shlex.quote(sys.executable)} -m antiphon "$@"; }}; curl() {{ command curl -sS --fail "$@"; }}\n'
)
# Seconds after which an example is ended. No example takes nearly as long unless it hangs.
LIMIT_S = 300


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, *languages: str) -> list[tuple[str, str]]:
    """Return the fenced blocks in these languages as (language, code)."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)
    return [(language, code) for language, code in found if language in languages]


def commands(code: str) -> list[str]:
    """Return the command lines of a shell block. Continued lines are joined."""
    return [line for line in code.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture(scope="module")
def everything(serve: Serve) -> Process:
    """Return a server with the default models."""
    return serve("--language-model", LANGUAGE_MODEL, "--synthesizer", VOICE)


@pytest.fixture
def folder(tmp_path: Path, recordings: dict[str, Recording]) -> Path:
    """Return a folder that looks to the examples like the root of the repository, with a meeting and a call."""
    for name in ("docs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "meeting.flac").symlink_to(ROOT / "tests" / "data" / "audio" / "jfk.flac")
    caller, agent = recordings["tau2-help-me"].pcm, recordings["tau2-yes"].pcm
    call = np.zeros((len(caller) + len(agent), 2), np.float32)
    call[: len(caller), 0], call[len(caller) :, 1] = caller, agent
    (tmp_path / "call.wav").write_bytes(wav(pcm16(call), channels=2))
    return tmp_path


def run(command: list[str], code: str, server: Process, folder: Path) -> str:
    """Run an example with the server's address instead of the written one. Return its output."""
    done = done_with(command, code, server, folder)
    assert done.returncode == 0, f"{code}\n{done.stderr}"
    return done.stdout


def done_with(command: list[str], code: str, server: Process, folder: Path) -> subprocess.CompletedProcess[str]:
    code = code.replace("http://127.0.0.1:8000", server.url).replace("ws://127.0.0.1:8000", server.ws)
    return subprocess.run(
        [*command, code],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("rate_hz", "channels", "seconds", "message"),
    [
        (22_050, 1, 1.0, "Invalid rate: 22050"),
        (16_000, 2, 1.0, "mono"),
        (16_000, 1, 0.05, "buffer too small"),
    ],
)
def test_the_first_program_says_what_is_wrong_with_a_recording_and_ends(
    rate_hz: int, channels: int, seconds: float, message: str, everything: Process, folder: Path
) -> None:
    with wave.open(str(folder / "question.wav"), "wb") as file:
        file.setparams((channels, 2, rate_hz, 0, "NONE", ""))
        file.writeframes(bytes(2 * channels * int(rate_hz * seconds)))
    (code,) = [code for _, code in blocks("docs/use.md", "python") if "intent" in code][:1]
    done = done_with([sys.executable, "-W", "error", "-c"], code, everything, folder)
    assert done.returncode == 1
    assert message in done.stderr


# The longest page: CI runs the others.
PAGES_TO_RUN = [pytest.param(p, marks=pytest.mark.heavy if p == "docs/use.md" else ()) for p in PAGES]


@pytest.mark.parametrize("page", PAGES_TO_RUN)
def test_the_examples_of_a_page_run(page: str, everything: Process, folder: Path) -> None:
    printed = []
    for language, code in blocks(page, "python", "sh"):
        if language == "python":
            printed.append(run([sys.executable, "-W", "error", "-c"], code, everything, folder))
            continue
        for line in commands(code):
            if (line.startswith("curl ") and CURL) or re.search(rf"\bantiphon ({'|'.join(RUN)})\b", line):
                run(["bash", "-c"], SHELL + line, everything, folder)
    assert len(printed) == len(PRINTED[page])
    for words, said in zip(PRINTED[page], printed, strict=True):
        assert words in said
    for name in WRITTEN[page]:
        assert (folder / name).stat().st_size > 10_000


def calls(code: str) -> Iterator[ast.Call]:
    tree = ast.parse(code)
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def shape(call: ast.Call) -> dict[str, tuple[str, ...]]:
    """Return the keywords of a call, each with the keys of its value if that is a dict."""
    return {
        keyword.arg or "**": tuple(ast.unparse(key) for key in getattr(keyword.value, "keys", []) if key)
        for keyword in call.keywords
    }


@pytest.mark.parametrize("diff", [code for _, code in blocks("docs/coming-from.md", "diff")])
def test_what_is_to_be_changed_is_what_the_drivers_do(diff: str) -> None:
    lines = [line for line in diff.splitlines() if not line.startswith("-")]
    after = textwrap.dedent("\n".join(line[1:] for line in lines))
    if "const " in after:
        driver = (CLIENTS / "node" / ("gemini.mjs" if "GoogleGenAI" in after else "drive.mjs")).read_text()
        for key in re.findall(r"[{ ](\w+): ", after):
            assert f"{key}: " in driver
        return
    if after.startswith("speech-to-speech "):
        # The command builds this configuration from its flags.
        driver = (CLIENTS / "drive_speech2speech.py").read_text()
        (flag,) = re.findall(r" --(\w+)", after)
        assert f"RealtimeAudioClientConfig({flag}=" in driver
        return
    if after.rstrip().endswith(":"):
        after += "\n    ..."
    proven = 0
    for call in calls(after):
        if driver_name := PROVEN.get(name_of(call)):
            driver = (CLIENTS / driver_name).read_text()
            made = [shape(c) for c in calls(driver) if name_of(c) == name_of(call)]
            # A driver may pass some of the keywords from a dict.
            wanted = shape(call).items()
            assert any(all(m.get(k, v if "**" in m else None) == v for k, v in wanted) for m in made)
            proven += 1
    assert proven or "AsyncOpenAI(" in after


def mentions(page: str, program: str) -> list[list[str]]:
    """Return the words of every `program …` in the page's code, both inline and in fenced blocks."""
    text = text_of(page)
    inline = re.findall(rf"`({program} [^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    fenced = [
        found[1]
        for _, code in blocks(page, "sh")
        for line in commands(code)
        if (found := re.search(rf"(?:^|\| )({program} [^|#<]+)", line))
    ]
    return [shlex.split(mention) for mention in (*inline, *fenced)]


@cache
def flags(command: str) -> set[str]:
    """Return the flags in the help text of a command."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        argument_parser().parse_args([command, "--help"])
    return set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", shown.getvalue()))


@pytest.mark.slow
@pytest.mark.parametrize("page", ALL_PAGES)
def test_commands_and_flags_exist(page: str) -> None:
    for _, command, *words in mentions(page, "antiphon"):
        assert command in COMMANDS
        if command != "bench":
            assert {word for word in words if word.startswith("-") and word != "-"} <= flags(command), (command, words)


@pytest.mark.parametrize("page", ALL_PAGES)
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^(\w+):", text_of("Makefile"), re.MULTILINE))
    for _, target, *_ in mentions(page, "make"):
        assert target in targets


def test_the_readme_is_short() -> None:
    lines = text_of("README.md").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


def test_every_page_is_in_the_index() -> None:
    index = text_of("docs/index.md")
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert {page for page in pages if f"({page})" not in index} == set()
