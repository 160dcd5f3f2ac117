# shellcheck shell=bash
# Choosing a Python and making .venv. Sourced by scripts/setup, after system.sh.
# shellcheck disable=SC2154  # the variables of the scripts that source this

# python_version COMMAND: "3.11", or nothing when it does not run.
python_version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null || true
}

# python_fits VERSION: inside the range, whose upper end TensorFlow may lower.
python_fits() {
    case "$1" in
        3.10 | 3.11) return 0 ;;
        3.12) [[ "$newest_python" == 3.12 ]] ;;
        *) return 1 ;;
    esac
}

# choose_python: sets $python to a command in the range, or ends with advice.
choose_python() {
    local candidate version seen=""
    if [[ -n "$python" ]]; then
        version="$(python_version "$python")"
        [[ -n "$version" ]] || die "--python $python does not run"
        python_fits "$version" || die "--python $python is Python $version" \
            "Needed: 3.10 to $newest_python${python_reason:+ ($python_reason)}."
        return
    fi
    for _ in 1 2; do
        # The default first: it is the one whose headers are most likely there.
        for candidate in python3 python3.11 python3.12 python3.10; do
            version="$(python_version "$candidate")"
            [[ -n "$version" ]] || continue
            seen+="${seen:+, }$candidate is $version"
            if python_fits "$version"; then
                python="$candidate"
                return
            fi
        done
        # A machine with no Python at all gets the distribution's.
        [[ -z "$seen" ]] || break
        apt_install python3 python3-venv python3-dev || break
    done
    die "no Python from 3.10 to $newest_python here${python_reason:+ ($python_reason)}" \
        "Found: ${seen:-none}." \
        "Install one (a package python3.11, pyenv, uv or conda) and run" \
        "  scripts/setup --python /path/to/python3.11"
}

# make_venv: .venv with a Python in the range. One that is there and fits stays.
make_venv() {
    local current version
    current="$(python_version "$venv/bin/python")"
    if [[ -n "$current" ]] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        if [[ -z "$python" ]] && python_fits "$current"; then return; fi
        if [[ -n "$python" && "$(python_version "$python")" == "$current" ]]; then
            choose_python
            return
        fi
    fi
    choose_python
    version="$(python_version "$python")"
    # Debian splits these off, and then "python3 -m venv" fails half-way.
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        apt_install "python$version-venv" || die "this Python $version cannot make a virtual environment" \
            "As root: apt-get install python$version-venv" \
            "then run scripts/setup again."
    fi
    step "making .venv with Python $version"
    "$python" -m venv --clear "$venv"
}
