# shellcheck shell=bash
# How a study under examples/studies is run. Sourced by scripts/*_study.

# shellcheck source=scripts/lib/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# run_study NAME ARGUMENT...: examples/studies/NAME.py with the interpreter of .venv, on one thread.
run_study() {
    local name="$1"
    shift
    [[ -x "$venv/bin/python" ]] || die "there is no .venv yet" "Run scripts/setup first."
    cd "$root"
    export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv" TF_CPP_MIN_LOG_LEVEL=3
    export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 NUMBA_NUM_THREADS=1
    export PYTHONPATH="$root/examples${PYTHONPATH:+:$PYTHONPATH}"
    exec python -m "studies.$name" "$@"
}
