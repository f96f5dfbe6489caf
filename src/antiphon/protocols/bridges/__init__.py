"""Other servers' duplex dialects, spoken to the same sessions."""
