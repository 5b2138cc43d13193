#!/usr/bin/env bash
# Four plain processes of one loop on this machine. One is killed, the others continue; restarted, it joins them.
#
#     examples/four_processes.sh --strategy adpsgd --steps 1500
set -euo pipefail

WORLD_SIZE=4 MASTER_ADDR=127.0.0.1
MASTER_PORT=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export WORLD_SIZE MASTER_ADDR MASTER_PORT
folder=$(mktemp -d)
trap 'kill -9 $(jobs -p) 2>/dev/null || true; rm -r "$folder"' EXIT

for rank in 0 1 2 3; do
    RANK=$rank python "$(dirname "$0")/surviving.py" "$@" >"$folder/$rank" 2>&1 &
    pids[rank]=$!
done

await() { # a line in the output of some process
    until grep -qs "$1" "$folder"/*; do
        if [ -z "$(jobs -pr)" ]; then cat "$folder"/*; exit 1; fi
        sleep 0.1
    done
}

await 'step 100'
kill -9 "${pids[2]}"
echo 'learner 2: kill -9'
await '3 learners'
RANK=2 python "$(dirname "$0")/surviving.py" "$@" >"$folder/again" 2>&1 &
pids[2]=$!
await '4 learners'
for rank in 0 1 2 3; do wait "${pids[rank]}"; done
grep -h 'learners' "$folder"/[013] | sort -u
