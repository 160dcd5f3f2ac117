"""What measurements share: hosts, options, gradients, ranks, samples, tables and pictures."""
