"""Figures of the papers that one process can make."""
