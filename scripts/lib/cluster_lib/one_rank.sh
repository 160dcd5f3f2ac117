#!/usr/bin/env bash
# One rank of a run:   one_rank.sh LOG_FOLDER COMMAND...
# Rank 0 speaks to the terminal, the others to LOG_FOLDER/rank-N.log.
# A rank that fails leaves LOG_FOLDER/rank-N.failed with the time and its exit code.
set -uo pipefail
folder="$1"
shift
# Horovod's launcher sets the first, Open MPI the second.
rank="${HOROVOD_RANK:-${OMPI_COMM_WORLD_RANK:-0}}"
log="$folder/rank-$rank.log"
status=0
if [[ -n "${OMPI_COMM_WORLD_RANK:-}" ]]; then
    # Open MPI polls where Gloo sleeps. Left to move, its threads gather on one core for seconds, and a launch is up
    # to twice as slow as another; on a machine of its own a rank would have its own. So ranks get cores in turn.
    # (Not nproc: it says what OMP_NUM_THREADS says.)
    taskset --cpu-list --pid "$((rank % $(getconf _NPROCESSORS_ONLN)))" $$ >/dev/null 2>&1 || true
fi
if [[ "$rank" == 0 ]]; then
    "$@" </dev/null || status=$?
else
    "$@" >"$log" 2>&1 </dev/null || status=$?
fi
if [[ "$status" != 0 ]]; then
    printf '%s %s %s\n' "$(date +%s.%N)" "$rank" "$status" >"$folder/rank-$rank.failed"
fi
exit "$status"
