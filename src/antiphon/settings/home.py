"""The settings of the server's part in a home: the Wyoming protocol, which Home Assistant speaks."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.settings.option import Form, option

ADDRESS = Form(
    r"(\[[0-9A-Fa-f:.%\w]+\]|[^\[\]/:\s]*):\d{1,5}",
    "expected HOST:PORT, as in 127.0.0.1:10300 or [::1]:10300",
)
SERVICE = Form(r"[^.\x00-\x1f]{1,60}", "expected 1 to 60 characters without a dot")


@dataclass(frozen=True, slots=True)
class WyomingSettings:
    """The section `[wyoming]`: the port for Home Assistant and other clients of the Wyoming protocol."""

    wyoming: str = option(
        "",
        "Address of the Wyoming protocol, `HOST:PORT`; off by default. The protocol has neither keys nor encryption.",
        form=ADDRESS,
    )
    wyoming_allow: str = option(
        "",
        "Addresses and networks whose clients may use `--wyoming`, comma separated, as in `192.168.1.0/24`. Loopback "
        "may always use it. Required for an address that others can reach, unless `--allow-anonymous` is given.",
    )
    wyoming_zeroconf: str = option(
        "",
        "Name under which the Wyoming port is announced to the local network, so that Home Assistant finds it; not "
        "announced by default. Needs the extra `[wyoming]`.",
        form=SERVICE,
    )
    wyoming_endpointing: str = option(
        "server",
        "Who finds the end of a command that is transcribed over Wyoming: this server, with its turn detector, or the "
        "`client`, with its own pause and its `audio-stop`. Home Assistant before 2026.5 always does it itself.",
        choices=("server", "client"),
    )
    wyoming_instructions: str = option(
        "You are the voice assistant of a home. Answer in one or two short sentences of plain text.",
        "Instructions for the language model when it answers as a conversation agent over Wyoming.",
    )
