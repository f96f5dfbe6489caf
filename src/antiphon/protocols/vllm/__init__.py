"""vLLM's realtime transcription dialect, with answers where a model gives them."""
