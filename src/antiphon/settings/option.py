"""One setting: its default, its help and its checks, stated once as a field of a section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# A setting's value. A tuple is given as a list by the command line and by a TOML file.
Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """What a text has to look like: the whole of it matches `pattern`, else the error is `says`, without the value."""

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
    """A setting's limits, inclusive, and its flag and variable where those names differ from the field's, else "".

    `also`: another name of the setting, which is accepted wherever its own is; "": there is none.
    `no_blanks`: an empty value is an error, where other settings take it for one that was not given. `secret`: it has
    no flag, because other users of the machine can read flags, and no error repeats its value. `form`: of each of its
    values, without the white space around it.
    """

    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    flag: str = ""
    variable: str = ""
    also: str = ""
    no_blanks: bool = False
    secret: bool = False
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
    """Return a field of the settings with its default, its help, and its checks, which are those of `Check`."""
    if also:
        help += f" Also named `--{also.replace('_', '-')}`."
    check = Check(low, high, choices, flag, variable, also, no_blanks, secret, form)
    return field(default=default, metadata={"help": help, "check": check})
