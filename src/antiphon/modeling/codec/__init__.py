"""Speech as codes, in Qwen3-TTS and Qwen3-Omni: choosing the codes of a frame of audio, and their audio."""
