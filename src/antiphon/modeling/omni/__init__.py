"""Code shared by Qwen2.5-Omni and Qwen3-Omni: conversations, encoders, and the checkpoint's chat template."""
