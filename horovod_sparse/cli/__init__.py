"""The commands: worth-it, calibrate, doctor."""
