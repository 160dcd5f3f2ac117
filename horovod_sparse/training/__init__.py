"""One training for all frameworks: settings, agreement, steps, checkpoints, errors."""
