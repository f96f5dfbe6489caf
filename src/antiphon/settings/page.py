"""Writes the page of all settings, docs/settings.md."""

from __future__ import annotations

import textwrap

from antiphon.settings.sources import options


def markdown() -> str:
    """The text of docs/settings.md, which `python -m antiphon.settings > docs/settings.md` writes."""
    lines = [
        "# Settings",
        "",
        "Generated from `antiphon/settings/`. Later sources win: default, TOML file (`--config FILE`), environment,",
        "flag. An unknown name or a bad value stops the start and names the key: any variable that begins with",
        "`ANTIPHON_` and is none of these, too. What takes several values may be named in the singular as well",
        "(`ANTIPHON_API_KEY`).",
        "",
        "Behind each flag are the environment variable and the TOML key with its default. The headings are the",
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
