"""What a rank does in a step, all but the network: `scripts/bench local`."""
