"""The edits that let Horovod 0.28.1 build against today's frameworks.

Run as ``python edit_source.py SOURCE_FOLDER TENSORFLOW_VERSION GPU``, the version
empty where TensorFlow is not wanted, GPU 0 or 1. Each edit insists on finding its line: a
source that looks different must not be built as if it had been edited.
"""

import re
import sys
from pathlib import Path


def edit(path: Path, pattern: str, replacement: str) -> None:
    """Replace the one place in ``path`` where ``pattern`` matches."""
    text, count = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
    if count != 1:
        sys.exit(f"error: {path} holds {count} matches of {pattern!r}, not one; is this Horovod 0.28.1?")
    path.write_text(text)


def main() -> None:
    """Edit the source folder named on the command line."""
    source, tensorflow, gpu = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

    # PyTorch's headers need C++17 since 2.1.
    for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        edit(source / name, r"^(\s*set\(CMAKE_CXX_STANDARD) 14\)", r"\1 17)")

    # TensorFlow no longer ships the XLA headers this file includes. Only the
    # collectives inside XLA programs (HOROVOD_ENABLE_XLA_OPS=1) are lost.
    if tensorflow and tuple(map(int, tensorflow.split(".")[:2])) >= (2, 18):
        edit(source / "horovod/tensorflow/CMakeLists.txt", r"^.*xla_mpi_ops\.cc.*\n", "")

    # PyTorch's CUDA build, which pip installs where nothing else is asked for,
    # makes Horovod look for a whole CUDA toolkit as soon as an nvcc lies about.
    if gpu != "1":
        question = r"print\(True if \(\(torch\.version\.cuda is not None\).* else False\)"
        edit(source / "cmake/Modules/FindPytorch.cmake", question, "print(False)")


main()
