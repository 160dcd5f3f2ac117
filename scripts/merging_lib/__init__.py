"""How far the greedy merging is from the best, by the model."""
