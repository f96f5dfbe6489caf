"""What a connection and a request pass before their route, and answers of errors."""
