#!/bin/sh
# Start a node: supernode.sh CLIENT [arguments of flower-supernode]. CLIENT is a number from 0 to 2.
# LACONIC_DATA_SOURCE="module:function" gives the client's data; without it they are those of [data] in run.toml.
set -eu
. "$(dirname "$0")/env.sh"
CLIENT=$1; shift
CONFIG="partition-id=$CLIENT num-partitions=3 state=\"${LACONIC_STATE:-$HERE/states}\""
CONFIG="$CONFIG resident=${LACONIC_RESIDENT:-true}"
[ -z "${LACONIC_DATA_SOURCE:-}" ] || CONFIG="$CONFIG data=\"$LACONIC_DATA_SOURCE\""
PORT=${LACONIC_NODE_PORT:-$((9094 + CLIENT))}
exec flower-supernode --superlink "$ADDRESS" --port "$PORT" --node-config "$CONFIG" --root-certificates "$HERE/certs/ca.crt" --auth-supernode-private-key "$HERE/certs/node-$CLIENT.key" "$@"
