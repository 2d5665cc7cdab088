#!/bin/sh
# Start the run, or go on with it where it was left. Extra arguments go to `flwr run`.
set -eu
. "$(dirname "$0")/env.sh"
exec flwr run "$HERE" laconic --stream "$@"
