# shellcheck shell=bash
# Launching ranks of Horovod on this machine, each with a limit on its time.
# Sourced by scripts/test, after common.sh.
# shellcheck disable=SC2154  # root is set there

# mpirun_options: what Open MPI needs on a small machine, one option per line.
mpirun_options() {
    if [[ "$(id -u)" == 0 ]]; then echo --allow-run-as-root; fi
    # More ranks than cores is normal here. Without yielding, idle ranks burn the
    # cores that busy ones need, and a launch takes many times as long.
    printf '%s\n' --oversubscribe --bind-to none --mca mpi_yield_when_idle 1
}

# launch KIND SIZE SECONDS LOG_FOLDER COMMAND...: KIND is gloo or mpi. Each rank's
# output goes to LOG_FOLDER/rank-N.log, the launcher's to LOG_FOLDER/launcher.log.
# A launch that does not end in time is ended, and counts as failed.
launch() {
    local kind="$1" size="$2" seconds="$3" folder="$4" launcher=()
    shift 4
    # The models of tests are too small for a sparsifier to win, which is what they are there to test.
    export HOROVOD_SPARSE_TENSOR_SELECTION="${HOROVOD_SPARSE_TENSOR_SELECTION:-all}"
    rm -rf "$folder"
    mkdir -p "$folder"
    if [[ "$kind" == gloo ]]; then
        launcher=(python "$root/scripts/lib/horovodrun.py" --gloo -np "$size")
    else
        launcher=(mpirun)
        # Options as Open MPI spells them; another MPI gets none.
        if [[ "$(mpirun --version 2>&1)" == *"Open MPI"* ]]; then
            mapfile -t -O 1 launcher < <(mpirun_options | tr ' ' '\n')
        fi
        launcher+=(-np "$size")
    fi
    # Horovod's own launcher sets the first, Open MPI the second, Hydra (MPICH) the third.
    # shellcheck disable=SC2016  # expanded by each rank
    local rank='exec "$@" >"$0/rank-${HOROVOD_RANK:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}}.log" 2>&1 </dev/null'
    timeout --kill-after=15 "$seconds" "${launcher[@]}" bash -c "$rank" "$folder" "$@" \
        >"$folder/launcher.log" 2>&1 </dev/null
}

# launch_report FOLDER STATUS: what a failed launch has to say, most telling first.
launch_report() {
    local folder="$1" status="$2" log last
    if [[ "$status" == 124 || "$status" == 137 ]]; then
        say "the launch did not end in time and was ended; where each rank was:"
    fi
    for log in "$folder"/rank-*.log; do
        [[ -f "$log" ]] || continue
        last="$(grep -v '^$' "$log" | tail -n 1 || true)"
        # A rank that passed has nothing to tell.
        [[ "$last" =~ (^|\ )[0-9]+\ passed && ! "$last" =~ failed|error ]] && continue
        say "--- $(basename "$log" .log), the end of it ($log)"
        tail -n 60 "$log" >&2
    done
    say "--- the launcher ($folder/launcher.log)"
    tail -n 15 "$folder/launcher.log" >&2
}
