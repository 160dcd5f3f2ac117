"""Carries messages between pairs of ranks: over MPI if every rank can, else by all-to-all."""
