"""The HTTP layers in front of the routes: connections, origins, keys, bodies, and error responses."""
