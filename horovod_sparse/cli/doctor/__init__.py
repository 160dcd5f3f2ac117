"""`horovod-sparse doctor`: looks at an installation, its settings, and a launch."""
