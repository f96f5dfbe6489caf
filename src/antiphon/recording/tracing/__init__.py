"""What each turn of a conversation took, stage by stage, and its export as OpenTelemetry traces."""
