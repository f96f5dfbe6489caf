"""The settings of TLS, and of other programs' protocols: Wyoming of Home Assistant, carriers' streams, SIP."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.settings.option import KEY, Form, option

ADDRESS = Form(
    r"(\[[0-9A-Fa-f:.%\w]+\]|[^\[\]/:\s]*):\d{1,5}",
    "expected HOST:PORT, as in 127.0.0.1:10300 or [::1]:10300",
)
SERVICE = Form(r"[^.\x00-\x1f]{1,60}", "expected 1 to 60 characters without a dot")
PORTS = Form(r"\d{1,5}-\d{1,5}", "expected FIRST-LAST, as in 16384-32767")
SIP_CODECS = Form(
    r"(?i)(opus|g722|pcmu|pcma)(\s*,\s*(opus|g722|pcmu|pcma))*", "expected some of G722,opus,PCMU,PCMA, the best first"
)
SIP_ACCOUNT = Form(
    r"sip:[^@\s:;?]+@[^@\s;?]+(;transport=(tcp|udp))?",
    "expected sip:USER@HOST or sip:USER@HOST:PORT, with ;transport=tcp for TCP",
)
IP_ADDRESS = Form(r"[0-9A-Fa-f:.]+", "expected an address, as in 203.0.113.7")
TRANSFER = Form(r"[^=]{1,60}=\s*(sip:[!-~]{1,250}|[\w.+*#-]{1,60})\s*", "expected NAME=sip:USER@HOST or NAME=NUMBER")
PUBLIC_URL = Form(
    r"https?://[^/\s?#]+(/[^\s?#]*[^\s?#/])?",
    "expected the base URL that carriers use, https://HOST or https://HOST/PATH, without a slash at its end",
)

WEBHOOK_URL = Form(r"https?://[^/\s?#]+(/[^\s#]*)?", "expected an http or https URL")
WEBHOOK_SECRET = Form(r"whsec_[A-Za-z0-9+/]{16,}={0,2}", "expected `whsec_` and base64 of at least 12 bytes")
SID = Form(r"AC[0-9a-f]{32}", "expected AC and 32 hexadecimal digits")


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


@dataclass(frozen=True, slots=True)
class TelephoneSettings:
    """The section `[telephone]`: calls of Twilio, Telnyx, Plivo, Exotel, Vonage, Asterisk and FreeSWITCH."""

    telephone_url: str = option(
        "",
        "Base URL at which carriers reach this server, as in `https://voice.example.com`; by default `https://` and "
        "the Host header of their request. Set it if a proxy in front of the server changes the host or the path.",
        form=PUBLIC_URL,
    )
    twilio_auth_token: str = option(
        "",
        "Auth token of the Twilio account. With it, `/v1/telephone/twilio` accepts only requests that Twilio has "
        "signed for this account, instead of requests with an API key. The calls belong to the first API key.",
        secret=True,
        form=KEY,
    )
    telephone_instructions: str = option(
        "You are on the telephone. Answer in one or two short sentences of plain text. When the caller has said "
        "goodbye, say goodbye and hang up.",
        "Instructions for the conversation model in a call whose client secret has none. The numbers and the "
        "parameters of the call follow them.",
    )
    telephone_greeting: str = option(
        "",
        "What the model says when a call begins, as in `Hello, this is the surgery.`; by default the caller speaks "
        "first. The model gets it as an instruction, so that it may change the words.",
    )
    telephone_call_s: float = option(
        1800.0, "Longest call, in seconds; 0: as long as a session (`--session-s`).", low=0
    )
    telephone_start_s: float = option(
        10.0, "Seconds in which a carrier's media stream has to say which call it carries.", low=0.1
    )
    telephone_webhook: str = option(
        "",
        "URL of an application that decides about incoming calls: it gets OpenAI's event `realtime.call.incoming`, and "
        "accepts or rejects the call. By default, all calls are taken. Calls with a client secret are not asked about.",
        form=WEBHOOK_URL,
    )
    telephone_webhook_secret: str = option(
        "",
        "Secret that signs the events for `--telephone-webhook`, `whsec_` and base64, as OpenAI's.",
        secret=True,
        form=WEBHOOK_SECRET,
    )
    telephone_ring_s: float = option(
        20.0, "Seconds in which the application has to accept a call. It is rejected then.", low=1
    )
    telephone_transfer: tuple[str, ...] = option(
        (),
        "Where the model may transfer a call to, `NAME=NUMBER` or `NAME=sip:USER@HOST`. It gets the names, and the "
        "function `transfer`, which it does not have without this setting.",
        form=TRANSFER,
    )
    telephone_dial: str = option(
        "",
        "Beginnings of the numbers that clients may call, and transfer calls to, comma separated, as in `+49,+4420`; "
        "`*` allows all. By default there are none.",
    )
    twilio_account: str = option("", "SID of the Twilio account that calls out and transfers calls, `AC…`.", form=SID)
    twilio_number: str = option("", "The number that calls out over Twilio come from, if a request names none.")
    twilio_api: str = option(
        "https://api.twilio.com", "Base URL of Twilio's API. Nothing else is called.", form=PUBLIC_URL
    )
    audiosocket: str = option(
        "",
        "Address of the port for Asterisk's AudioSocket, `HOST:PORT`; off by default. The protocol has neither keys "
        "nor encryption. Its calls belong to the first API key.",
        form=ADDRESS,
    )
    audiosocket_allow: str = option(
        "",
        "Addresses and networks of the switches that may use `--audiosocket`, comma separated. Loopback may always use "
        "it. Required for an address that others can reach, unless `--allow-anonymous` is given.",
    )


@dataclass(frozen=True, slots=True)
class SipSettings:
    """The section `[sip]`: calls over SIP and RTP, from a provider, a switch or a telephone."""

    sip: str = option(
        "",
        "Address of SIP, `HOST:PORT`, over UDP and TCP; off by default. It has no encryption. SRTP needs the extra "
        "`[sip]`.",
        form=ADDRESS,
    )
    sip_allow: str = option(
        "",
        "Addresses and networks that may call over `--sip`, comma separated, as in `192.168.1.0/24`. Loopback and the "
        "provider of `--sip-register` may always. For an address that others can reach, this list, a provider, a "
        "password or `--allow-anonymous` is required. The calls belong to the first API key.",
    )
    sip_caller_password: str = option(
        "",
        "Password that callers over SIP need (digest, with any user name), in addition to their address.",
        secret=True,
        form=KEY,
    )
    sip_register: str = option(
        "",
        "Account at a SIP provider or a switch, `sip:USER@HOST`: the server registers there, takes its calls, and "
        "calls others through it.",
        form=SIP_ACCOUNT,
    )
    sip_password: str = option("", "Password of the account of `--sip-register`.", secret=True, form=KEY)
    sip_public_address: str = option(
        "",
        "Address at which callers over SIP reach this server, if it is not its own: behind NAT, or in a container. The "
        "ports are the same.",
        form=IP_ADDRESS,
    )
    sip_rtp_ports: str = option(
        "16384-32767", "UDP ports for the audio of calls over SIP; a call takes an even one.", form=PORTS
    )
    sip_codecs: str = option("G722,opus,PCMU,PCMA", "Codecs of calls over SIP, best first.", form=SIP_CODECS)
    sip_comedia: bool = option(
        False,
        "Send audio to where the caller's audio comes from, for callers behind NAT. By default, audio from another "
        "address than the agreed one is dropped.",
    )
