#!/bin/sh
# Install a wheel into an empty environment far from the repository, with nothing but the core, and use it there.
set -eu
wheel=$(realpath "$1")
constraints=$(realpath "$2")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check -c "$constraints" "$wheel"
cat > run.toml <<'TOML'
[run]
name = "far-away"
rounds = 2
cohort = 5
[data]
source = "digits"
clients = 10
TOML
venv/bin/laconic run run.toml
venv/bin/laconic list methods
test -s runs/far-away/summary.json
echo "the wheel works: $(basename "$wheel")"
