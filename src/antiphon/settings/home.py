"""The settings of a server in a home: TLS, and the Wyoming protocol, which Home Assistant speaks."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.settings.option import Form, option

ADDRESS = Form(
    r"(\[[0-9A-Fa-f:.%\w]+\]|[^\[\]/:\s]*):\d{1,5}",
    "expected HOST:PORT, as in 127.0.0.1:10300 or [::1]:10300",
)
SERVICE = Form(r"[^.\x00-\x1f]{1,60}", "expected 1 to 60 characters without a dot")


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The section `[tls]`: the certificate with which the server serves https and wss."""

    tls: str = option(
        "off",
        "`self-signed`: serve https and wss with a certificate for `localhost`, the machine's name and addresses, "
        "`--host` and `--allowed-host`. It is made once and kept in `ANTIPHON_HOME/tls`. TLS needs the extra `[tls]`.",
        choices=("off", "self-signed"),
    )
    tls_cert: str = option(
        "",
        "PEM file of a certificate with its chain: serve https and wss with it. Read again when it changes.",
    )
    tls_key: str = option("", "PEM file of the key of `--tls-cert`, without a password. Read again when it changes.")
    tls_allow_expired: bool = option(
        False, "Serve with a `--tls-cert` that has expired or is not valid yet, which most clients refuse."
    )


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
