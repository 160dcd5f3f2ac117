# shellcheck shell=bash
# What has to come from the distribution: compiler, Python headers, Open MPI.
# Sourced by scripts/setup and scripts/lib/horovod/build_wheel, after common.sh.
# shellcheck disable=SC2154  # the variables of the scripts that source this

# as_root COMMAND...: fails, without asking, where nobody could type a password.
as_root() {
    if [[ "$(id -u)" == 0 ]]; then
        "$@"
    elif have sudo && { sudo -n true 2>/dev/null || [[ -t 0 ]]; }; then
        sudo "$@"
    else
        return 1
    fi
}

can_install() { have apt-get && as_root true; }

# apt_install PACKAGE...: 0 only if every package is there afterwards.
apt_install() {
    can_install || return 1
    mkdir -p "$cache/logs"
    local log="$cache/logs/apt.log"
    : >"$log"
    step "installing $* through apt"
    # A machine whose lists are fresh enough needs no update; a bare one has none.
    logged "$log" as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends "$@" && return 0
    logged "$log" as_root apt-get update || true
    logged "$log" as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends "$@" && return 0
    say "    apt could not install them; its own words:"
    { grep -E '^(E|Err|W):?' "$log" || tail -n 5 "$log"; } | tail -n 5 | sed 's/^/    /' >&2
    return 1
}

# mpi_version: a short name of the MPI that programs are built and launched with,
# or nothing. Both halves must be there: mpirun alone cannot build Horovod.
mpi_version() {
    have mpirun && have mpicxx || return 0
    local text number
    text="$(mpirun --version 2>&1 </dev/null || true)"
    number="$(sed -n 's/^mpirun (Open MPI) \([0-9][0-9.a-z]*\).*/\1/p' <<<"$text" | head -n 1)"
    if [[ -n "$number" ]]; then
        echo "openmpi$number"
    else
        # Another MPI: any name will do that changes when it changes.
        echo "mpi$(cksum <<<"$text" | cut -d ' ' -f 1)"
    fi
}

# need_build_tools PYTHON: a C++ compiler, make, and the headers of that Python.
need_build_tools() {
    local python="$1" version headers missing=()
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    headers="$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
    have g++ || missing+=(g++)
    have make || missing+=(make)
    [[ -f "$headers/Python.h" ]] || missing+=("python$version-dev")
    [[ ${#missing[@]} == 0 ]] && return 0
    # libc6-dev is only recommended by g++, and without it nothing links.
    apt_install "${missing[@]}" libc6-dev && return 0
    die "building Horovod needs ${missing[*]}" \
        "As root: apt-get install ${missing[*]} libc6-dev" \
        "then run scripts/setup again."
}

# warn_host_name: Horovod's Gloo ends with a segmentation fault, and not a word
# why, on a machine that cannot resolve its own name (a bare chroot, say).
warn_host_name() {
    local name
    name="$(uname -n)"
    if ! getent hosts "$name" >/dev/null || ! getent hosts localhost >/dev/null; then
        say "    careful: this machine cannot resolve localhost or its own name, $name, and then"
        say "    Horovod's Gloo crashes. As root: echo '127.0.0.1 localhost $name' >> /etc/hosts"
    fi
}
