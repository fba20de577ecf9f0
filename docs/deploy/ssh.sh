#!/usr/bin/env bash
# Starts a worker on each host over ssh, runs a command here that trains on them, and ends the workers.
#
#   docs/deploy/ssh.sh 10.0.0.1 me@10.0.0.2 -- python docs/examples/train_on_cluster.py
#
# The hosts are given by their addresses in the private network, which this machine is in, too: the workers listen on
# these. Settings, from the environment:
#
#   PORT=2222       port of the workers
#   DEVICES=0       logical CPU devices of each; 0 for its GPUs, or one CPU device if it has none
#   DIRECTORY=...   where the project is on the hosts; by default the folder that this is called in
#   PYTHON=python   Python there, with dapple_tf installed, such as .venv/bin/python
set -euo pipefail

port=${PORT:-2222}
devices=${DEVICES:-0}
directory=${DIRECTORY:-$PWD}
python=${PYTHON:-python}
start_seconds=120

hosts=()
while (($#)) && [[ $1 != -- ]]; do
  hosts+=("$1")
  shift
done
if ((${#hosts[@]} == 0 || $# < 2)); then
  echo "usage: $0 [user@]address... -- command..." >&2
  exit 2
fi
shift

workers=()
finish() {
  trap - EXIT INT TERM
  # The workers' terminals go with their connections, and the workers with these.
  if ((${#workers[@]})); then
    kill "${workers[@]}" 2>/dev/null || true
    wait "${workers[@]}" 2>/dev/null || true
  fi
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

quoted=""
for host in "${hosts[@]}"; do
  address="${host#*@}:$port"
  remote=$(printf 'cd %q && exec %q -m dapple_tf.worker --address=%q --devices=%q' \
    "$directory" "$python" "$address" "$devices")
  # With a terminal (-tt) the worker gets a signal when the connection breaks.
  ssh -tt -o BatchMode=yes -o ServerAliveInterval=15 "$host" "$remote" </dev/null >&2 &
  workers+=($!)
  quoted+="${quoted:+, }\"$address\""
done

for host in "${hosts[@]}"; do
  until (exec 3<>"/dev/tcp/${host#*@}/$port") 2>/dev/null; do
    if ((SECONDS > start_seconds)); then
      echo "no worker answers on ${host#*@}:$port after $start_seconds s" >&2
      exit 1
    fi
    sleep 1
  done
done

export TF_CONFIG="{\"cluster\": {\"worker\": [$quoted]}, \"task\": {\"type\": \"chief\", \"index\": 0}}"
"$@"
