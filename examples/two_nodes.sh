#!/usr/bin/env bash
# Two "nodes" on one machine: two torchrun agents, one learner each, that meet on loopback.
#
#     examples/two_nodes.sh recipes/demo.yaml name=two-nodes budget.steps=40
#
# On real nodes, run the torchrun line once on each, with its own --node-rank and node 0's address.
set -euo pipefail

port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

node() {
    torchrun --nnodes 2 --nproc-per-node 1 --node-rank "$1" --master-addr 127.0.0.1 --master-port "$port" \
        --module starling train "${@:2}"
}

node 1 "$@" &
other=$!
trap 'kill "$other" 2>/dev/null || true' EXIT
node 0 "$@"
wait "$other"
