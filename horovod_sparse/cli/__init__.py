"""What is run from a shell."""
