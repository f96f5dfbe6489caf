"""hibari: an English voice whose sound is made in chunks."""
