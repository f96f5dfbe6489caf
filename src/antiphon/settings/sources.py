"""Reads the settings from their sources, and checks each value: defaults < TOML file < environment < flags."""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from antiphon.errors import SettingsError
from antiphon.settings.option import Check, Value
from antiphon.settings.sections import Settings

PREFIX = "ANTIPHON_"
# Variables that are not settings: a key of `antiphon certify`, and variables that the project's tests and benchmarks
# pass to the programs they start.
_NO_SETTINGS = ("ANTIPHON_CERTIFY_KEY", "ANTIPHON_TALK_KEY")
_NO_SETTINGS_PREFIXES = ("ANTIPHON_TEST_", "ANTIPHON_BENCH_")


@dataclass(frozen=True, slots=True)
class Option:
    """One setting as the command line, the environment and the docs see it."""

    # The section of the TOML file.
    section: str
    # The name of the field.
    name: str
    # The field's Python type.
    type: Any
    # The value if no source sets it.
    default: Any
    # The help text.
    help: str
    # The limits and alternative names.
    check: Check

    @property
    def flag(self) -> str:
        """The flag with its leading dashes.

        For a tuple it is given once for each value; for a boolean it also has a `--no-` form.
        """
        return "--" + (self.check.flag or self.name.replace("_", "-"))

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag, and that of the setting's other name, if it has one."""
        return (self.flag, *(["--" + self.check.also.replace("_", "-")] if self.check.also else []))

    @property
    def variable(self) -> str:
        """The environment variable, which starts with ANTIPHON_ unless another server defines it.

        It separates a tuple's values by commas.
        """
        return self.check.variable or PREFIX + self.name.upper()

    @property
    def singular(self) -> str:
        """The name of one value of a tuple (`api_key` of `api_keys`), which is accepted as well, or ""."""
        name = self.check.flag.replace("-", "_")
        return name if name + "s" == self.name else ""

    @property
    def other_names(self) -> tuple[str, ...]:
        """The additional names that variables and files accept."""
        return tuple(filter(None, (self.singular, self.check.also)))


@cache
def options() -> tuple[Option, ...]:
    """Every setting, in the order of the tree. Names are unique across the sections."""
    out: list[Option] = []
    for part in fields(Settings):
        section = get_type_hints(Settings)[part.name]
        hints = get_type_hints(section)
        out += [
            Option(part.name, f.name, hints[f.name], f.default, f.metadata["help"], f.metadata["check"])
            for f in fields(section)
        ]
    return tuple(out)


def parse(opt: Option, value: Any, where: str) -> Any:
    """Convert `value`, a string from the environment or a flag, or a TOML value, to the option's type, and check it.

    Raises SettingsError, whose message begins with `where`, the name of the flag, variable or key.
    """
    if opt.check.no_blanks and _has_blank(value):
        raise SettingsError(f"{where}: a value is empty; set it, or leave it out altogether")
    try:
        result = _convert(opt.type, value)
    except (TypeError, ValueError):
        shown = "the value given" if opt.check.secret else repr(value)
        raise SettingsError(f"{where}: {shown} is not a valid value") from None
    if form := opt.check.form:
        result = result.strip() if isinstance(result, str) else result
        if not all(re.fullmatch(form.pattern, each) for each in ([result] if isinstance(result, str) else result)):
            raise SettingsError(f"{where}: {form.says}")
    low, high, choices = opt.check.low, opt.check.high, opt.check.choices
    if low is not None and result < low:
        raise SettingsError(f"{where}: {result} is below {low}")
    if high is not None and result > high:
        raise SettingsError(f"{where}: {result} is above {high}")
    for each in (result if isinstance(result, tuple) else [result]) if choices else ():
        if each not in choices:
            raise SettingsError(f"{where}: {each!r} is not one of {', '.join(choices)}")
    return result


def _has_blank(value: Any) -> bool:
    values = value.split(",") if isinstance(value, str) else value
    return isinstance(values, list | tuple) and any(isinstance(v, str) and not v.strip() for v in values)


def _convert(kind: Any, value: Any) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if str(value).lower() not in words:
            raise ValueError
        return words[str(value).lower()]
    if kind in (int, float):
        if isinstance(value, bool):
            raise ValueError
        return kind(value)
    if kind is str:
        if not isinstance(value, str):
            raise ValueError
        return value
    items = value.split(",") if isinstance(value, str) else value
    if not all(isinstance(i, str) for i in items):
        raise ValueError
    return tuple(i.strip() for i in items if i.strip())


def load(
    flags: Mapping[str, Value | list[str] | None] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """The settings from all sources: defaults, then the TOML `file`, then `environment`, then `flags`.

    `flags` maps field names to values; None and an empty list mean that the flag was not given. A setting with several
    values is also accepted by its singular, and a setting with another name by that name.

    Raises SettingsError, which names the key, for an unknown name (including variables that begin with ANTIPHON_), an
    invalid value, contradictory values, or a file that cannot be read.
    """
    known = {o.name: o for o in options()}
    chosen: dict[str, Value] = {}
    if file is not None:
        chosen |= _from_toml(file, known)
    chosen |= _from_environment(environment or {}, known)
    names = known | {o.check.also: o for o in known.values() if o.check.also}
    for name, value in (flags or {}).items():
        if (found := names.get(name)) is None:
            raise SettingsError(f"{name}: no such setting")
        if value is not None and value != []:
            chosen[found.name] = parse(found, value, found.flag)
    tree = Settings()
    for part in fields(Settings):
        values = {n: v for n, v in chosen.items() if known[n].section == part.name}
        tree = replace(tree, **{part.name: replace(getattr(tree, part.name), **values)})
    if tree.engine.decode_shapes in ("bucketed", "captured") and tree.engine.kv_layout == "session":
        raise SettingsError(f"--decode-shapes {tree.engine.decode_shapes} needs --kv-layout paged")
    return tree


def environment_of(settings: Settings) -> dict[str, str]:
    """Return the environment variables from which `load` returns the same settings, without those at their defaults."""
    out = {}
    for o in options():
        value = getattr(getattr(settings, o.section), o.name)
        if value != o.default:
            out[o.variable] = ",".join(value) if isinstance(value, tuple) else str(value)
    return out


def _from_environment(environment: Mapping[str, str], known: Mapping[str, Option]) -> dict[str, Value]:
    chosen: dict[str, Value] = {}
    names = {o.variable: o for o in known.values()}
    names |= {PREFIX + other.upper(): o for o in known.values() for other in o.other_names}
    given_by: dict[str, str] = {}
    for name, given in environment.items():
        if (found := names.get(name)) is None:
            if name.startswith(PREFIX) and name not in _NO_SETTINGS and not name.startswith(_NO_SETTINGS_PREFIXES):
                raise SettingsError(f"{name}: no such setting{_meant(name, names)} (see docs/settings.md)")
            continue
        if given or found.check.no_blanks:
            if found.name in chosen:
                first, second = sorted((name, given_by[found.name]), key=lambda n: n != found.variable)
                raise SettingsError(f"{first} and {second} are both set; set one")
            chosen[found.name], given_by[found.name] = parse(found, given, name), name
    return chosen


def _meant(name: str, names: Iterable[str]) -> str:
    """The known name that is most similar to `name`, as a question, or "" if none is similar."""
    close = get_close_matches(name, list(names), 1, 0.75)
    return f"; did you mean {close[0]}?" if close else ""


def _from_toml(file: Path, known: Mapping[str, Option]) -> dict[str, Value]:
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise SettingsError(f"--config {file}: {error}") from None
    chosen: dict[str, Value] = {}
    for section, values in data.items():
        own = {o.name: o for o in known.values() if o.section == section}
        if not isinstance(values, dict) or not own:
            meant = _meant(section, {o.section for o in known.values()})
            raise SettingsError(f"{file}: {section}: no such section{meant}")
        names = own | {other: o for o in own.values() for other in o.other_names}
        for name, value in values.items():
            where = f"{file}: [{section}] {name}"
            if (found := names.get(name)) is None:
                raise SettingsError(f"{where}: {_elsewhere(name, section, known) or 'no such setting'}")
            if found.name in chosen:
                raise SettingsError(f"{where}: {found.name} is set twice")
            chosen[found.name] = parse(found, value, where)
    return chosen


def _elsewhere(name: str, section: str, known: Mapping[str, Option]) -> str:
    """The error for a key that its section of a file lacks."""
    if name in known:
        return f"it belongs to the section [{known[name].section}]"
    return "no such setting" + _meant(name, [o.name for o in known.values() if o.section == section])


def markdown() -> str:
    """The text of docs/settings.md, which `python -m antiphon.settings > docs/settings.md` writes."""
    lines = [
        "# Settings",
        "",
        "Generated from `antiphon/settings/`. Later sources override earlier ones: default, TOML file",
        "(`--config FILE`), environment, flag. An unknown name or an invalid value stops the start with an error that",
        "names the key. This includes any other variable that begins with `ANTIPHON_`. A setting with several values",
        "is also accepted by its singular (`ANTIPHON_API_KEY`).",
        "",
        "Each flag is followed by its environment variable and by its TOML key with the default. The headings are the",
        "sections of the TOML file.",
    ]
    section = ""
    for o in options():
        if o.section != section:
            section = o.section
            lines += ["", f"## [{section}]", ""]
        default = '""' if o.default == "" else "[]" if o.default == () else f"{o.default!r}".replace("'", "")
        choices = f" One of: {', '.join(o.check.choices)}." if o.check.choices else ""
        name = f"**`{o.variable}`** (no flag, " if o.check.secret else f"**`{o.flag}`** (`{o.variable}`, "
        entry = f"- {name}`{o.name}`: `{default}`): {o.help}{choices}"
        lines += textwrap.wrap(entry, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"
