"""Questions about frames and sound."""
