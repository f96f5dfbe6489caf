"""Settings: which source wins, how values are checked, and the page that lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.cli.arguments import argument_parser
from antiphon.errors import SettingsError
from antiphon.settings import Option, environment_of, load, markdown, options

ROOT = Path(__file__).parents[1]


def test_when_sources_disagree_then_the_later_one_wins(tmp_path: Path) -> None:
    file = tmp_path / "antiphon.toml"
    file.write_text('[server]\nport = 1\nhost = "::1"\napi_keys = ["a"]\n[audio]\nmax_backlog_s = 5\n')
    settings = load({"port": "3", "api_keys": ["x", "y"]}, {"ANTIPHON_PORT": "2", "ANTIPHON_HOST": "127.0.0.2"}, file)
    assert settings.server.port == 3
    assert settings.server.host == "127.0.0.2"
    assert settings.server.api_keys == ("x", "y")
    assert settings.audio.max_backlog_s == 5.0
    assert load().server.port == 8000


@pytest.mark.parametrize(
    ("flags", "environment", "toml", "names"),
    [
        ({"port": "70000"}, {}, "", "--port"),
        ({"port": "http"}, {}, "", "--port"),
        ({"nonsense": 1}, {}, "", "nonsense"),
        ({"decode_shapes": "bucketed", "kv_layout": "session"}, {}, "", "--kv-layout paged"),
        ({}, {"ANTIPHON_OVERFLOW": "drop"}, "", "ANTIPHON_OVERFLOW"),
        ({}, {"ANTIPHON_STRICT_MODELS": "perhaps"}, "", "ANTIPHON_STRICT_MODELS"),
        ({}, {}, "[server]\nprot = 1\n", "prot"),
        ({}, {}, "[server]\nprot = 1\n", "did you mean port"),
        ({}, {}, "[sevrer]\nport = 1\n", "sevrer: no such section; did you mean server"),
        ({}, {}, "port = 1\n", "port: no such section"),
        ({}, {}, "[audio]\nport = 1\n", r"port: it belongs to the section \[server\]"),
        ({}, {}, '[server]\napi_key = ["a"]\napi_keys = ["b"]\n', "api_keys is set twice"),
        ({}, {"ANTIPHON_PROT": "8012"}, "", "ANTIPHON_PROT: no such setting; did you mean ANTIPHON_PORT"),
        ({}, {"ANTIPHON_API_KAYS": "a"}, "", "ANTIPHON_API_KAYS: no such setting; did you mean ANTIPHON_API_KEYS"),
        ({}, {"ANTIPHON_BEHIND": "http://a:1"}, "", "ANTIPHON_BEHIND: no such setting"),
        ({}, {"ANTIPHON_XYZZY_HOOK": ""}, "", r"ANTIPHON_XYZZY_HOOK: no such setting \("),
        ({}, {"ANTIPHON_API_KEY": ""}, "", "ANTIPHON_API_KEY: a value is empty"),
        ({}, {"ANTIPHON_API_KEY": "a", "ANTIPHON_API_KEYS": "b"}, "", "are both set"),
        ({}, {}, "[server]\nport = true\n", "port"),
        ({"api_keys": [""]}, {}, "", "--api-key: a value is empty"),
        ({"api_keys": ["key", " "]}, {}, "", "--api-key: a value is empty"),
        ({}, {"ANTIPHON_API_KEYS": ""}, "", "ANTIPHON_API_KEYS: a value is empty"),
        ({}, {"ANTIPHON_API_KEYS": "key,"}, "", "ANTIPHON_API_KEYS: a value is empty"),
        ({}, {}, '[server]\napi_keys = [""]\n', "api_keys: a value is empty"),
        ({}, {"ANTIPHON_API_KEYS": "one two"}, "", "^ANTIPHON_API_KEYS: a key is ASCII without spaces and line ends"),
        ({}, {"ANTIPHON_API_KEYS": "one\ntwo"}, "", "^ANTIPHON_API_KEYS: a key is ASCII"),
        ({}, {"ANTIPHON_METRICS_KEY": "schlüssel"}, "", "^ANTIPHON_METRICS_KEY: a key is ASCII"),
        ({}, {"ANTIPHON_INTERNAL_KEY": "a b"}, "", "^ANTIPHON_INTERNAL_KEY: a key is ASCII"),
        ({"api_keys": ["a b"]}, {}, "", "^--api-key: a key is ASCII"),
        ({"host": "[::1]"}, {}, "", "^--host: expected a name or an address"),
        ({"host": "0.0.0.0:8000"}, {}, "", "^--host: expected .* --port"),
        ({"host": "http://0.0.0.0"}, {}, "", "^--host: expected a name"),
        ({"cors_origins": ["voice.example.org"]}, {}, "", "^--cors-origin: expected an origin"),
        ({"cors_origins": ["https://voice.example.org/app"]}, {}, "", "^--cors-origin: expected an origin"),
        ({}, {"ANTIPHON_CORS_ORIGINS": "https://a.example https://b.example"}, "", "_ORIGINS: expected an origin"),
    ],
)
def test_when_a_value_is_wrong_then_the_error_names_its_key(
    flags: dict[str, object], environment: dict[str, str], toml: str, names: str, tmp_path: Path
) -> None:
    file = None
    if toml:
        file = tmp_path / "antiphon.toml"
        file.write_text(toml)
    with pytest.raises(SettingsError, match=names):
        load(flags, environment, file)


@pytest.mark.parametrize("name", ["api_key", "cors_origin", "allowed_host", "ice_server"])
def test_what_takes_several_values_may_be_named_in_the_singular(name: str, tmp_path: Path) -> None:
    file = tmp_path / "antiphon.toml"
    file.write_text(f'[server]\n{name} = ["http://a", "http://b"]\n')
    for settings in (load({}, {f"ANTIPHON_{name.upper()}": "http://a,http://b"}), load({}, {}, file)):
        assert getattr(settings.server, name + "s") == ("http://a", "http://b")


ALSO_NAMED = [option for option in options() if option.check.also]


@pytest.mark.parametrize("option", ALSO_NAMED, ids=lambda option: option.name)
def test_a_setting_may_be_given_by_its_other_name(option: Option, tmp_path: Path) -> None:
    other, value = option.check.also, option.check.choices[-1] if option.check.choices else "folder"
    file = tmp_path / "antiphon.toml"
    file.write_text(f'[{option.section}]\n{other} = "{value}"\n')
    for settings in (load({other: value}), load({}, {f"ANTIPHON_{other.upper()}": value}), load({}, {}, file)):
        assert getattr(getattr(settings, option.section), option.name) == value != option.default
    flags = ("--" + option.name.replace("_", "-"), "--" + other.replace("_", "-"))
    assert option.flags == flags
    for flag in flags:
        assert getattr(argument_parser().parse_args(["serve", flag, value]), option.name) == value


@pytest.mark.parametrize("option", ALSO_NAMED, ids=lambda option: option.name)
def test_when_a_setting_is_given_by_both_its_names_then_it_is_refused(option: Option, tmp_path: Path) -> None:
    other, value = option.check.also, option.check.choices[-1] if option.check.choices else "folder"
    variables = (f"ANTIPHON_{option.name.upper()}", f"ANTIPHON_{other.upper()}")
    for given in (variables, variables[::-1]):
        with pytest.raises(SettingsError, match=f"^{variables[0]} and {variables[1]} are both set"):
            load({}, dict.fromkeys(given, value))
    file = tmp_path / "antiphon.toml"
    file.write_text(f'[{option.section}]\n{option.name} = "{value}"\n{other} = "{value}"\n')
    with pytest.raises(SettingsError, match=f"{option.name} is set twice"):
        load({}, {}, file)


def test_conversation_and_video_models_have_two_names() -> None:
    assert {frozenset((o.name, o.check.also)) for o in ALSO_NAMED} == {
        frozenset(("partner", "conversation_model")),
        frozenset(("watcher", "video_model")),
        frozenset(("watcher_prefill", "video_prefill")),
    }


@pytest.mark.parametrize(
    "host", ["", "::", "::1", "fe80::1%eth0", "::ffff:10.0.0.1", "localhost", "10.0.0.1", "a_b-c.d"]
)
def test_a_host_is_a_name_or_an_address(host: str) -> None:
    assert load({"host": host}).server.host == host


def test_a_key_from_a_file_may_end_with_its_line() -> None:
    settings = load({}, {"ANTIPHON_API_KEYS": "one, two\n", "ANTIPHON_METRICS_KEY": "three\n"})
    assert (settings.server.api_keys, settings.server.metrics_key) == (("one", "two"), "three")


def test_when_the_settings_file_cannot_be_read_then_the_error_names_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "antiphon.toml"
    with pytest.raises(SettingsError, match=f"^--config {file}: No such file"):
        load({}, {}, file)
    for content in (b"[server", b"\xff"):
        file.write_bytes(content)
        with pytest.raises(SettingsError, match=f"^--config {file}: "):
            load({}, {}, file)


def test_variables_that_are_not_ours_are_left_alone() -> None:
    load({}, {"PATH": "/bin", "ANTIPHON_CERTIFY_KEY": "key", "ANTIPHON_TEST_PACE_S": "1"})


def test_when_settings_change_then_their_page_is_generated_anew() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == markdown()


def test_when_settings_are_listed_then_their_names_and_flags_are_unique() -> None:
    flags = [flag for o in options() for flag in o.flags]
    names = [name for o in options() for name in (o.name, *o.other_names)]
    assert len(set(flags)) == len(flags)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"api_keys": ["one", "two"], "headroom": "false", "drain_s": "2.5", "state": "redis://store:6379/0"},
        {"max_sessions": "3", "hosts": ["http://a:1", "http://b:2"], "certificate": "/etc/certificate.json"},
    ],
)
def test_settings_as_variables_are_read_as_the_same_settings(flags: dict[str, object]) -> None:
    settings = load(flags, {})
    variables = environment_of(settings)
    assert load({}, variables) == settings
    assert set(variables) <= {option.variable for option in options()}
    assert bool(variables) == bool(flags)
