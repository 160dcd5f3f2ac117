"""What happened in a step."""
