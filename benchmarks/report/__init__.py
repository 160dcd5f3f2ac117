"""Fills the tables of docs/performance.md: `scripts/report`."""
