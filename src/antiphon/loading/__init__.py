"""From settings to loaded models: which models are named, how each is made, and which ones a process has."""
