"""ElevenLabs' dialects: text to speech over HTTP and WebSockets, and transcription. See docs/wire/elevenlabs.md."""
