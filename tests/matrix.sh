#!/usr/bin/env bash
# Runs the core tests, those of what differs between versions, the examples and the first of each
# family of programs on the supported range of JAX: each Python takes the JAX that its users have.
# Random programs run on the default JAX alone.
# Pythons that the machine lacks are named and left out; it fails if it finds none or a run fails.
set -u
cd "$(dirname "$0")/.."

find_python() { # find_python 3.12 -> a path that runs, or nothing
    local candidate
    for candidate in "$(command -v "python$1")" "$HOME"/.pyenv/versions/"$1".*/bin/python; do
        [ -n "$candidate" ] && [ -x "$candidate" ] || continue
        "$candidate" -c 'import venv' 2>/dev/null && { echo "$candidate"; return; }
    done
}

tests=(tests/core tests/jax_compat tests/partition tests/upstream tests/examples tests/programs
    --ignore=tests/programs/test_fuzz.py)
num_run=0
failed=()
missing=()
run() { # run PYTHON_VERSION JAX_REQUIREMENT [pytest arguments]
    local version=$1 jax=$2 python venv stamp
    shift 2
    python=$(find_python "$version")
    [ -n "$python" ] || { missing+=("python$version with $jax"); return; }
    venv=.venvs/py$version
    stamp=$venv/.installed
    if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
        echo "== installing $jax into $venv"
        "$python" -m venv "$venv" &&
            "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
                --editable '.[test]' "$jax" && touch "$stamp" ||
            { failed+=("python$version install"); return; }
    fi
    echo "== $("$venv/bin/python" -c 'import sys, jax; print("Python", sys.version.split()[0], "JAX", jax.__version__)')"
    num_run=$((num_run + 1))
    "$venv/bin/python" -m pytest -q -n "${JOBS:-2}" -m "not slow and not family" "${tests[@]}" "$@" ||
        failed+=("python$version with $jax")
}

run 3.11 'jax==0.10.2' "$@"
run 3.12 'jax>=0.11,<0.12' "$@"
run 3.13 'jax' "$@"

for what in "${missing[@]}"; do echo "== not run, no such Python here: $what"; done
for what in "${failed[@]}"; do echo "== FAILED: $what"; done
[ "$num_run" -gt 0 ] && [ ${#failed[@]} -eq 0 ]
