"""Rounds that several algorithms share: messages in pairs, sums by region, sums at common indices."""
