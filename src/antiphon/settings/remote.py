"""The settings of models on other servers: keys, formats, deadlines, and what may be sent; and of tool servers.

The URLs are values of the settings that name the models, such as `--transcriber URL#MODEL`.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.settings.option import KEY, Form, option


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """The section `[remote]`: models on other servers (`URL#MODEL`, `--engine`)."""

    remote_key: str = option(
        "", "API key of the language model's servers, sent to them as a bearer token.", secret=True, form=KEY
    )
    remote_key_file: str = option("", "File with that key, if the variable is not set.")
    transcriber_key: str = option("", "API key of the transcriber's servers.", secret=True, form=KEY)
    transcriber_key_file: str = option("", "File with that key, if the variable is not set.")
    synthesizer_key: str = option("", "API key of the synthesizer's servers.", secret=True, form=KEY)
    synthesizer_key_file: str = option("", "File with that key, if the variable is not set.")
    synthesizer_format: str = option(
        "wav",
        "Format in which a voice's server is asked for audio: `wav`, whose header tells the rate, `pcm`, or `sse` "
        "(events with PCM). An answer in another of these formats is read too.",
        choices=("wav", "pcm", "sse"),
    )
    synthesizer_rate: int = option(
        24000,
        "Rate in Hz of the audio that a voice's server sends without telling its rate. Audio of another rate is "
        "resampled to it.",
        low=8000,
        high=48000,
    )
    remote_answer_s: float = option(
        10.0,
        "Longest time in seconds in which the server of a transcriber or synthesizer has to begin its answer. When "
        "times were measured, the limit is four times the 95th percentile, if that is less.",
        low=0.1,
    )
    remote_hedge: bool = option(
        False,
        "Send a second request, to another server if there is one, when the first sound of a voice takes longer than "
        "usual.",
    )
    fallback: bool = option(
        False,
        "Also load the profile's own models, which continue while the servers of a conversation model, native or not, "
        "or of a voice do not answer.",
    )
    remote_first_token_s: float = option(
        10.0,
        "Seconds in which the first word of an answer has to arrive. After half of that time the request is sent a "
        "second time, and the answer that begins first is used.",
        low=0.1,
    )
    remote_token_s: float = option(
        10.0, "Seconds in which each further word has to arrive; otherwise the answer fails.", low=0.1
    )
    remote_media: bool = option(
        False, "The model hears and sees: it receives audio and images instead of text made from them."
    )
    remote_preemptive: int = option(
        0,
        "Preemptive answers that a conversation may begin in a minute, while the user may still continue. Each is an "
        "additional request that may be wasted.",
        low=0,
    )


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """The section `[tools]`: tool servers, whose tools are functions of all conversations."""

    mcp: str = option(
        "",
        "File that lists MCP servers, in the form that MCP clients share (`mcpServers`). Their tools are functions of "
        "all conversations, and the server carries out their calls. Needs the extra `[mcp]`.",
    )
    mcp_from_clients: tuple[str, ...] = option(
        (),
        "Host of MCP servers that clients may name in their sessions: `mcp.example.com`, `*.example.com`, or `*` for "
        "all; repeat for several. Private addresses are refused unless one is given explicitly, as in `10.0.0.7:9000`.",
        flag="mcp-from-clients",
    )
    filler: tuple[str, ...] = option(
        (),
        "Line that is said while a call of a tool server takes longer than `--filler-after-s`, such as `One moment.`; "
        "repeat for several, which are said in turn. `generated`: the model words it. By default there is none.",
        no_blanks=True,
    )
    filler_after_s: float = option(0.5, "Seconds of a call after which the filler is said.", low=0)
    own: tuple[str, ...] = option(
        (),
        "Function of antiphon's own that all conversations have: `time`, or `remember`, with which the model keeps "
        "notes for later conversations of the same API key; repeat for both.",
        flag="tool",
        variable="ANTIPHON_TOOLS",
        form=Form("time|remember", "expected time or remember"),
        no_blanks=True,
    )
    notes_per_key: int = option(200, "Most notes that one API key may have (`--tool remember`).", low=1)
    note_days: int = option(365, "Days after which a note is deleted; 0: never.", low=0)
