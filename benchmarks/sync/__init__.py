"""One synchronization across hosts: `scripts/bench sync`."""
