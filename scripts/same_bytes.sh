#!/usr/bin/env bash
# Simulates a trace under several Pythons and hash seeds, and says whether requests.jsonl is the same, byte for byte.
#
#     scripts/same_bytes.sh python3.11 python3.12 python3.13 -- --trace=conversation_trace.jsonl --prefill=8 --decode=8
#
# Each Python needs mooncake_jax (or PYTHONPATH to it), absl-py, numpy and rich; jax and MPI are not needed. Exit code 0
# if all are the same, 1 if not, 2 if a run fails.
set -euo pipefail

pythons=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    pythons+=("$1")
    shift
done
if [ ${#pythons[@]} -eq 0 ] || [ $# -lt 2 ]; then
    echo "usage: scripts/same_bytes.sh PYTHON... -- FLAGS OF SIMULATE" >&2
    exit 2
fi
shift

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
runs=0
for python in "${pythons[@]}"; do
    for hash_seed in 0 12345; do
        runs=$((runs + 1))
        PYTHONHASHSEED=$hash_seed "$python" -m mooncake_jax simulate "$@" --out="$work/$runs" >"$work/printed" || exit 2
        sum=$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' \
            "$work/$runs/requests.jsonl")
        rm -r "${work:?}/$runs"
        echo "$sum" >>"$work/sums"
        echo "$sum  $("$python" --version) ($python), PYTHONHASHSEED=$hash_seed"
    done
done
contents=$(sort -u "$work/sums" | wc -l)
echo "$runs runs, $((contents)) content$([ "$contents" -eq 1 ] || echo s)"
[ "$contents" -eq 1 ]
