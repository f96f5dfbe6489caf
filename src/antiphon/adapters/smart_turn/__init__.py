"""Smart Turn: judges whether a turn that pauses is complete."""
