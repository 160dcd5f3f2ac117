"""Carries requests beside an engine: by messages between pairs of ranks, over MPI if every rank can."""
