"""Speaker recognition, which finds out whose voice a turn is."""
