"""Speaker recognition: whose voice a turn is."""
