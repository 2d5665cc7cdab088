# Read by the other scripts. Nothing is reported, fetched or installed unasked, and Flower's own files lie here.
HERE=$(cd "$(dirname "$0")" && pwd)
ADDRESS=${LACONIC_SUPERLINK:-127.0.0.1:8000}
export FLWR_HOME=${FLWR_HOME:-$HERE/home}
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 RAY_USAGE_STATS_ENABLED=0
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=${FLWR_SUPEREXEC_TASK_POLL_INTERVAL:-0.1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<END
[superlink]
default = "laconic"

[superlink.laconic]
address = "$ADDRESS"
root-certificates = "$HERE/certs/ca.crt"
END
