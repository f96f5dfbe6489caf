"""Sound as the input of models: log-mel frames, and the encoder that Qwen3-ASR and Qwen3-Omni share."""
