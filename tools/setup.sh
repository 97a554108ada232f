# SPDX-License-Identifier: Apache-2.0
# Make .venv with the pinned packages, or find it ready. Sourced by run.sh and test.sh from the repository root.
# EXTRAS lists the optional dependencies of pyproject.toml to install; the default is what the tests need.

python_312() {
    # Print a Python 3.12 that can make environments: from PATH, else from pyenv.
    local candidate
    for candidate in python3.12 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

install_packages() {
    # Run pip with its output in a log, a line of progress on the terminal, and the log's end if it fails.
    local log=.venv/install.log start=$SECONDS
    .venv/bin/python -m pip install --disable-pip-version-check -e ".[${EXTRAS:-test}]" >"$log" 2>&1 &
    local pip=$!
    while kill -0 "$pip" 2>/dev/null; do
        [ -t 2 ] && printf '\r\033[K  %3d s  %.90s' $((SECONDS - start)) "$(tail -n 1 "$log" | tr -cd '[:print:]')" >&2
        sleep 1
    done
    [ -t 2 ] && printf '\r\033[K' >&2
    if ! wait "$pip"; then
        tail -n 25 "$log" >&2
        echo "Installing failed; the whole log is in $log." >&2
        return 1
    fi
    echo "Installed in $((SECONDS - start)) s." >&2
}

set_up() {
    local stamp python
    stamp=$(echo "${EXTRAS:-test}" | cat - pyproject.toml setup.py | cksum)
    if [ "$(cat .venv/.stamp 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    if ! [ -x .venv/bin/python ]; then
        if ! python=$(python_312); then
            cat >&2 <<'TEXT'
Python 3.12 with venv was not found, neither on PATH nor under pyenv. megatron-core 0.19.2 has wheels for 3.12. Get it by one of
  pyenv install 3.12                                    (any system with pyenv)
  uv python install 3.12 && export PATH="$(dirname "$(uv python find 3.12)"):$PATH"
  apt install python3.12 python3.12-venv                (Ubuntu 24.04)
  dnf install python3.12                                (Fedora, RHEL 9)
and run this again.
TEXT
            return 1
        fi
        echo "Making .venv with $python" >&2
        "$python" -m venv .venv
    elif ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
        echo ".venv holds $(.venv/bin/python -V); Python 3.12 is needed. Remove .venv and run this again." >&2
        return 1
    fi
    echo "Installing the packages that pyproject.toml pins (torch and megatron-core; minutes, once) ..." >&2
    install_packages
    echo "$stamp" >.venv/.stamp
}

set_up
