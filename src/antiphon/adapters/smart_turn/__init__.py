"""Smart Turn: a turn detector, which judges whether a turn that pauses is complete."""
