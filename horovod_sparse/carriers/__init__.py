"""How requests travel beside an engine: messages between pairs of ranks, and the memory of a host."""
