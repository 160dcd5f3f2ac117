"""Rounds that several algorithms have: messages in pairs, sums by region, sums at indices that all know."""
