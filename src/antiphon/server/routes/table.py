"""The table of routes."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route, WebSocketRoute

from antiphon.server.routes.calls import accept, calls, hang_up, refer, reject
from antiphon.server.routes.chat import chat_completions
from antiphon.server.routes.client_secrets import client_secrets, sessions
from antiphon.server.routes.control import bury, drain_host, list_hosts, start_profile, stop_profile
from antiphon.server.routes.health import health, metrics, ready
from antiphon.server.routes.models import model, models, speech_models
from antiphon.server.routes.page import asset, client_module, root
from antiphon.server.routes.sockets import PATHS, realtime, speech_stream, video_stream
from antiphon.server.routes.speakers import speaker, speakers
from antiphon.server.routes.speech import batch, speech
from antiphon.server.routes.telephone import MEDIA, TWILIO, media, twilio
from antiphon.server.routes.telephone import calls as telephone_calls
from antiphon.server.routes.transcriptions import transcriptions, translations
from antiphon.server.routes.vendors import cartesia, elevenlabs, elevenlabs_voices, scribe
from antiphon.server.routes.vendors.deepgram_listen import listen
from antiphon.server.routes.vendors.deepgram_speak import speak, speak_stream
from antiphon.server.routes.voices import voice, voices

# The routes of telephone calls. A door serves them too, for the calls that it holds.
TELEPHONE_ROUTES: tuple[Route | WebSocketRoute, ...] = (
    Route("/v1/realtime/calls/{id}/accept", accept, methods=["POST"]),
    Route("/v1/realtime/calls/{id}/reject", reject, methods=["POST"]),
    Route("/v1/realtime/calls/{id}/refer", refer, methods=["POST"]),
    Route("/v1/telephone/calls", telephone_calls, methods=["GET", "POST"]),
    Route(TWILIO, twilio, methods=["POST"]),
    WebSocketRoute(MEDIA, media),
    WebSocketRoute(f"{MEDIA}/{{key}}", media),
)

ROUTES: tuple[BaseRoute, ...] = (
    Route("/", root),
    Route("/web/{name}", asset),
    Route("/web/client/{name}", client_module),
    Route("/health", health),
    Route("/ready", ready),
    Route("/metrics", metrics),
    Route("/internal/drain", drain_host, methods=["POST"]),
    Route("/internal/hosts", list_hosts, methods=["GET"]),
    Route("/internal/hosts/{name:path}", bury, methods=["DELETE"]),
    Route("/start_profile", start_profile, methods=["POST"]),
    Route("/stop_profile", stop_profile, methods=["POST"]),
    Route("/v1/models", models),
    Route("/v1/audio/models", speech_models),
    Route("/v1/models/{id:path}", model),
    Route("/v1/audio/transcriptions", transcriptions, methods=["POST"]),
    Route("/v1/audio/translations", translations, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/audio/speech", speech, methods=["POST"]),
    Route("/v1/audio/speech/batch", batch, methods=["POST"]),
    Route("/v1/audio/voices", voices, methods=["GET", "POST"]),
    Route("/v1/audio/voices/{name:path}", voice, methods=["DELETE"]),
    Route("/v1/speakers", speakers, methods=["GET", "POST"]),
    Route("/v1/speakers/{name:path}", speaker, methods=["DELETE"]),
    Route("/v1/voices", elevenlabs_voices.elevenlabs_voices),
    Route("/v2/voices", elevenlabs_voices.elevenlabs_voices),
    Route("/v1/voices/add", elevenlabs_voices.add_voice, methods=["POST"]),
    Route("/v1/voices/{voice_id}", elevenlabs_voices.elevenlabs_voice, methods=["GET", "DELETE"]),
    Route("/v1/convai/conversation/get-signed-url", elevenlabs.signed_url),
    Route("/v1/convai/conversation/get_signed_url", elevenlabs.signed_url),
    Route("/v1/text-to-speech/{voice_id}", elevenlabs.text_to_speech, methods=["POST"]),
    Route("/v1/text-to-speech/{voice_id}/with-timestamps", elevenlabs.text_to_speech_timed, methods=["POST"]),
    Route("/v1/text-to-speech/{voice_id}/stream", elevenlabs.text_to_speech_stream, methods=["POST"]),
    Route(
        "/v1/text-to-speech/{voice_id}/stream/with-timestamps",
        elevenlabs.text_to_speech_timed_stream,
        methods=["POST"],
    ),
    Route("/v1/speech-to-text", scribe.speech_to_text, methods=["POST"]),
    WebSocketRoute("/v1/text-to-speech/{voice_id}/stream-input", elevenlabs.stream_input),
    WebSocketRoute("/v1/text-to-speech/{voice_id}/multi-stream-input", elevenlabs.multi_stream_input),
    Route("/tts/bytes", cartesia.speak_bytes, methods=["POST"]),
    Route("/tts/sse", cartesia.speak_events, methods=["POST"]),
    WebSocketRoute("/tts/websocket", cartesia.speak_in_contexts),
    Route("/v1/listen", listen, methods=["POST"]),
    Route("/v1/speak", speak, methods=["POST"]),
    WebSocketRoute("/v1/speak", speak_stream),
    WebSocketRoute("/v1/audio/speech/stream", speech_stream),
    WebSocketRoute("/v1/video/chat/stream", video_stream),
    Route("/v1/realtime/calls", calls, methods=["POST"]),
    Route("/v1/realtime/calls/{id}/hangup", hang_up, methods=["POST"]),
    Route("/v1/realtime/client_secrets", client_secrets, methods=["POST"]),
    Route("/v1/realtime/sessions", sessions, methods=["POST"]),
    *TELEPHONE_ROUTES,
    *(WebSocketRoute(path, realtime) for path in PATHS),
)
