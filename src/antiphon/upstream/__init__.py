"""What talking to other servers over HTTP has in common: streams of events, circuit breakers, when to try again."""
