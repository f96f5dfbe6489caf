"""Tool servers of the Model Context Protocol (MCP): their tools are functions of all conversations."""
