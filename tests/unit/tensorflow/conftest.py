"""Nothing here is collected where TensorFlow, or Horovod for it, is not installed."""

try:
    import horovod.tensorflow  # noqa: F401
except ImportError:
    collect_ignore_glob = ["*"]
