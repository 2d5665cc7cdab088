#!/bin/sh
# Start the server's end. Extra arguments go to flower-superlink.
set -eu
. "$(dirname "$0")/env.sh"
exec flower-superlink --host "${LACONIC_BIND:-127.0.0.1}" --port "${ADDRESS##*:}" --ssl-ca-certfile "$HERE/certs/ca.crt" --ssl-certfile "$HERE/certs/server.pem" --ssl-keyfile "$HERE/certs/server.key" --enable-supernode-auth "$@"
