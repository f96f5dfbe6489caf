"""The OpenAI Realtime API, GA and beta: transcription sessions and conversations."""
