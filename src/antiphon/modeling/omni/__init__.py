"""What Qwen2.5-Omni and Qwen3-Omni have in common: conversations, encoders, and the checkpoint's chat template."""
