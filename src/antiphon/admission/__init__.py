"""Whether one more session fits: certificates, headroom, signals of overload. Pure, except that it reads files."""
