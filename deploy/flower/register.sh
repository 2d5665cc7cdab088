#!/bin/sh
# Tell the SuperLink which nodes may take part: the public keys in certs/.
set -eu
. "$(dirname "$0")/env.sh"
for key in "$HERE"/certs/node-*.pub; do
    flwr supernode register "$key" laconic
done
