"""The pauses of real speech, the fit of the end-of-turn model to them, and what it is worth on unknown speakers."""
