"""Text language models that `transformers` runs as they are: one class for every checkpoint with a causal decoder."""
