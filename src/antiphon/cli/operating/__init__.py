"""Commands for whoever runs servers: what is installed, what a server does and holds, who shares a store."""
