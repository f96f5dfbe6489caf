"""One setting: its default, its help and its checks, stated once as a field of a section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# A setting's value. On the command line and in a TOML file, a tuple is given as a list.
Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a text. If `pattern` does not match the whole text, the error is `says`, without the value."""

    pattern: str
    says: str


KEY = Form(r"[!-~]*", "a key is ASCII without spaces and line ends, as it is sent in a header")
HOST = Form(
    r"[^\[\]/:\s]*|(?=.*:.*:)[0-9A-Fa-f:.]+(%[\w.-]+)?",
    "expected a name or an address, without brackets and without the port, which is --port",
)
ORIGIN = Form(
    r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+/?",
    "expected an origin, as browsers send it: http://HOST:PORT or https://HOST, without a path; or *",
)


@dataclass(frozen=True, slots=True)
class Check:
    """A setting's limits and its alternative names."""

    # The least value, inclusive; None: no limit.
    low: float | None = None
    # The greatest value, inclusive; None: no limit.
    high: float | None = None
    # The accepted values; empty: any value.
    choices: tuple[str, ...] = ()
    # The flag's name, if it differs from the field's.
    flag: str = ""
    # The environment variable's name, if it does not follow from the field's.
    variable: str = ""
    # Another name of the setting, accepted wherever its own is; "": none.
    also: str = ""
    # Whether an empty value is an error. Other settings treat it as not given.
    no_blanks: bool = False
    # Whether the setting has no flag, because other users of the machine can read flags, and its value is left out of
    # errors.
    secret: bool = False
    # The form of each of its values, after surrounding white space is removed.
    form: Form | None = None


def option(
    default: Value,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    flag: str = "",
    variable: str = "",
    also: str = "",
    no_blanks: bool = False,
    secret: bool = False,
    form: Form | None = None,
) -> Any:
    """Return a field of the settings with its default, its help, and its checks, which are the fields of `Check`."""
    if also:
        help += f" Also named `--{also.replace('_', '-')}`."
    check = Check(low, high, choices, flag, variable, also, no_blanks, secret, form)
    return field(default=default, metadata={"help": help, "check": check})
