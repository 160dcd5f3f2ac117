"""What the front ends have in common, free of frameworks and of Horovod."""
