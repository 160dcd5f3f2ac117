# shellcheck shell=bash
# What every script here shares: where things are, and how to talk to the user.
# Sourced, never run; the sourcing script has set -euo pipefail.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
venv="$root/.venv"
# shellcheck disable=SC2034
default_torch=2.13.0
# Outside the repository, so that every clone on this machine shares the wheels.
# shellcheck disable=SC2034
cache="${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/horovod_sparse"
# What scripts/setup did last: its options, its stamp, and what Horovod can do.
# shellcheck disable=SC2034  # read by the scripts that source this file
record="$venv/horovod_sparse_setup"

# Everything goes to stderr: stdout is for results that another script reads.
say() { printf '%s\n' "$*" >&2; }
step() { [[ "${quiet:-0}" == 1 ]] || printf '==> %s\n' "$*" >&2; }
die() {
    printf '\n%s: %s\n' "$(basename "$0")" "$1" >&2
    shift
    local line
    for line in "$@"; do printf '  %s\n' "$line" >&2; done
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

# recorded NAME: the value that NAME has in the record, or nothing.
recorded() {
    [[ -f "$record" ]] || return 0
    sed -n "s/^$1=//p" "$record" | head -n 1
}

# logged FILE COMMAND...: run a command whose output matters only if it fails.
logged() {
    local log="$1"
    shift
    printf '\n$ %s\n' "$*" >>"$log"
    "$@" >>"$log" 2>&1 </dev/null
}
