"""From settings to loaded models: which models the settings name, how each is loaded, and the set that a process holds."""
