"""The inside of scripts/cluster: only Python's own library, so that it runs before scripts/setup did."""
