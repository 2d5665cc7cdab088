#!/bin/sh
# Tell the SuperLink which nodes may take part, and write down whose they are (nodes.toml): the public keys in certs/.
# A client moves to another key by: register.sh --client N --key FILE.pub
set -eu
. "$(dirname "$0")/env.sh"
exec laconic deploy register "$HERE" "$@"
