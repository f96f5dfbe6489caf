"""Whether one more session fits: certificates, headroom, signals of overload. Pure but for files."""
