"""The arguments of the commands: each setting's flag under its section's heading, and short usage lines."""

from __future__ import annotations

import re

import pytest

from antiphon.cli.arguments import BENCHMARKS, COMMANDS, HEADINGS, argument_parser
from antiphon.cli.main import main
from antiphon.settings import Option, options

WITH_SETTINGS = [name for name in COMMANDS if name != "bench"]
OPERANDS = {
    "inspect": ["qwen3-0.6b"],
    "transcribe": ["a.wav"],
    "say": ["Hello."],
    "watch": ["a.mp4", "--ask", "What is it?"],
    "replay": ["a"],
    "timeline": ["a"],
}


def help_of(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        argument_parser().parse_args([*arguments, "--help"])
    assert exit_.value.code == 0
    return capsys.readouterr().out


def sections_of(text: str) -> dict[str, list[str]]:
    """Return the long flags of a help text, by heading; a switch only by its positive form."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            heading = line.rstrip(":")
        elif flag := re.match(r"  (?:-\w(?: [A-Z]+)?, )?(--[a-z][a-z-]*)", line):
            found.setdefault(heading, []).append(flag[1])
    return found


def with_flags() -> list[Option]:
    """Return the settings that have flags: all except secrets, which other users could read on a command line."""
    return [o for o in options() if not o.check.secret]


def test_when_help_is_asked_for_then_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys=capsys)
    assert text.startswith("usage: antiphon COMMAND [options]\n")
    for name, command in COMMANDS.items():
        assert re.search(rf"^    {name}\s+{re.escape(command.help.split()[0])}", text, re.MULTILINE)


@pytest.mark.parametrize("name", WITH_SETTINGS)
def test_when_a_commands_help_is_asked_for_then_its_flags_stand_under_their_sections(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(name, capsys=capsys)
    operands = COMMANDS[name].operands
    assert text.splitlines()[0] == f"usage: antiphon {name} [options] {operands}".rstrip()
    shown = sections_of(text)
    assert {"--help", "--config"} <= set(shown["options"])
    for section, heading in HEADINGS.items():
        flags = [o.flag for o in with_flags() if o.section == section]
        assert shown.get(heading) == (flags if section in COMMANDS[name].sections else None)


def test_when_serves_help_is_asked_for_then_every_setting_has_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    shown = sections_of(help_of("serve", capsys=capsys))
    assert {o.flag for o in with_flags()} <= {flag for flags in shown.values() for flag in flags}


@pytest.mark.parametrize("name", WITH_SETTINGS)
def test_when_no_flag_is_given_then_no_setting_is_set(name: str) -> None:
    parsed = vars(argument_parser().parse_args([name, *OPERANDS.get(name, [])]))
    assert parsed["command"] == name
    names = {o.name for o in with_flags() if o.section in COMMANDS[name].sections}
    assert {parsed[setting] for setting in names} <= {None}


@pytest.mark.parametrize("name", WITH_SETTINGS)
def test_a_secret_has_no_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    secrets = [o.flag for o in options() if o.check.secret]
    keys = ("internal", "turn-detector", "remote", "transcriber", "synthesizer")
    others = "--twilio-auth-token", "--telephone-webhook-secret", "--sip-caller-password", "--sip-password"
    assert secrets == [*(f"--{name}-key" for name in keys), *others]
    assert all(f"{flag} " not in help_of(name, capsys=capsys) for flag in secrets)
    with pytest.raises(SystemExit):
        argument_parser().parse_args([name, *OPERANDS.get(name, []), "--remote-key", "sk-1"])


def test_when_flags_are_given_then_they_are_the_settings_values() -> None:
    arguments = ["serve", "--port", "1", "--api-key", "a", "--api-key", "b", "--no-offline", "--no-pull"]
    parsed = argument_parser().parse_args(arguments)
    assert (parsed.port, parsed.api_keys, parsed.offline, parsed.no_pull) == ("1", ["a", "b"], False, True)


def test_when_bench_is_run_then_its_options_are_left_to_the_benchmark() -> None:
    parsed, rest = argument_parser().parse_known_args(["bench", "asr", "--help", "--seconds", "5"])
    assert (parsed.command, parsed.name, rest) == ("bench", "asr", ["--help", "--seconds", "5"])


def test_when_bench_is_asked_for_help_then_the_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in BENCHMARKS)
    assert main(["bench"]) == 2
    assert "asr" in capsys.readouterr().err


def test_when_an_option_is_misspelt_then_the_one_that_was_meant_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for given, reported in (
        ("--prt", "; did you mean --port?"),
        ("--no-pul=1", "; did you mean --no-pull?"),
        ("--zz", ""),
    ):
        with pytest.raises(SystemExit) as exit_:
            main(["serve", given])
        assert exit_.value.code == 2
        assert capsys.readouterr().err.endswith(f"unrecognized arguments: {given}{reported}\n")


def test_when_top_is_given_a_url_then_it_is_the_servers() -> None:
    parsed = argument_parser().parse_args(["top", "http://a:1"])
    assert parsed.server == "http://a:1"
    parsed = argument_parser().parse_args(["top", "--url", "http://a:1"])
    assert (parsed.server, parsed.url) == (None, "http://a:1")
