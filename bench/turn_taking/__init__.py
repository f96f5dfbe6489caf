"""The pauses of real speech, the end-of-turn model fitted to them, and its figures for unknown speakers."""
