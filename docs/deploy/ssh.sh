#!/usr/bin/env bash
# Starts a worker on each host over ssh, runs a command here that trains on them, and ends the workers.
#
#   docs/deploy/ssh.sh 10.0.0.1 me@10.0.0.2 -- python docs/examples/train_on_cluster.py
#
# The hosts are given by addresses at which they reach each other and this machine: the workers listen on these. All
# connections are encrypted, by certificates that are made for this run and copied to the hosts. Settings, from the
# environment:
#
#   TLS=on          off for connections that aren't encrypted, in a private network; see docs/cluster.md
#   PORT=2222       port of the workers
#   DEVICES=0       logical CPU devices of each; 0 for its GPUs, or one CPU device if it has none
#   DIRECTORY=...   where the project is on the hosts; by default the folder that this is called in
#   PYTHON=python   Python there and here, with dapple_tf[tls] installed, such as .venv/bin/python
set -euo pipefail

port=${PORT:-2222}
devices=${DEVICES:-0}
directory=${DIRECTORY:-$PWD}
python=${PYTHON:-python}
tls=${TLS:-on}
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
directories=() # of the hosts' keys, there
keys=
finish() {
  trap - EXIT INT TERM
  # The workers' terminals go with their connections, and the workers with these.
  if ((${#workers[@]})); then
    kill "${workers[@]}" 2>/dev/null || true
    wait "${workers[@]}" 2>/dev/null || true
  fi
  for ((number = 0; number < ${#directories[@]}; number++)); do
    ssh -o BatchMode=yes "${hosts[number]}" "rm -rf ${directories[number]@Q}" </dev/null || true
  done
  if [[ -n $keys ]]; then
    rm -rf "$keys"
  fi
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [[ $tls != off ]]; then
  keys=$(mktemp -d)
  "$python" -m dapple_tf.tools.keys --directory="$keys" "${hosts[@]#*@}" client >&2
  for host in "${hosts[@]}"; do
    # shellcheck disable=SC2016 # To be expanded on the host.
    copy=$(tar -c -C "$keys/${host#*@}" . | ssh -o BatchMode=yes "$host" \
      'keys=$(mktemp -d) && tar -x --no-same-owner -C "$keys" && chmod go= "$keys" && echo "$keys"')
    directories+=("$copy")
  done
  export DAPPLE_TF_TLS=$keys/client
fi

quoted=""
for ((number = 0; number < ${#hosts[@]}; number++)); do
  host=${hosts[number]}
  address="${host#*@}:$port"
  remote=$(printf 'cd %q && exec %q -m dapple_tf.worker --address=%q --devices=%q' \
    "$directory" "$python" "$address" "$devices")
  if [[ $tls != off ]]; then
    remote+=$(printf ' --tls=%q' "${directories[number]}")
  fi
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
