"""Layer tables of known networks, derived from their architectures."""
