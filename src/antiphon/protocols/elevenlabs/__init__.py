"""ElevenLabs' dialects: text to speech over HTTP and WebSockets, transcription, agents. See docs/wire/elevenlabs.md."""
