"""`python -m horovod_sparse`: the same as the command `horovod-sparse`."""

import sys

from horovod_sparse.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
