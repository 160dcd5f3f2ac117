#!/usr/bin/env bash
# One rank of a launch: run a command with its output in a file of its own, so that
# the lines of several ranks do not mix.   one_rank.sh LOG_FOLDER COMMAND...
set -uo pipefail
folder="$1"
shift
# Horovod's own launcher sets the first, Open MPI the second, Hydra (MPICH) the third.
rank="${HOROVOD_RANK:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}}"
exec "$@" >"$folder/rank-$rank.log" 2>&1 </dev/null
