"""From settings to loaded models: their selection, their loading, and the set that a process holds."""
