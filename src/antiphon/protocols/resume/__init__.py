"""What resuming needs on the wire: the journal of sent frames, and its control messages."""
