"""How a session outlives its host: what is stored of it, how it is given away, and how another host takes it up."""
