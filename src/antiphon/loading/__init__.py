"""From settings to loaded models: which ones are named, how each is made, and what a process has."""
