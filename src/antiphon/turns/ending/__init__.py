"""When a pause ends a turn."""
