#!/usr/bin/env bash
# mooncake-jax replay on the hosts of a host file, with Open MPI or MPICH.
#
#     scripts/mpi_hosts.sh HOSTFILE [flags of mooncake-jax replay]
#
# HOSTFILE has a host a line with the number of its ranks, "node1 slots=2" or "node1:2"; one rank if none is given.
# Ranks fill the hosts in order: Conductor, then the stages of the first prefill instance, of the second, ..., then the
# decoding instances. So two prefill instances of two stages and one decoding instance, a GPU host for each rank that
# computes, are
#
#     node1 slots=2        # Conductor needs no GPU: it shares a host
#     node2
#     node3
#     node4
#     node5
#
#     scripts/mpi_hosts.sh hosts --prefill=2x2 --decode=1 --model=/shared/llama2-70b --out=/shared/results
#
# The environment, the model and --out must have the same path on all hosts. $PYTHON is python if not set; options
# for mpiexec go into $MPIEXEC_OPTIONS.
set -euo pipefail

fail() {
    echo "mpi_hosts.sh: $1" >&2
    exit 2
}

[ $# -ge 1 ] && [ -f "$1" ] && [ -r "$1" ] ||
    fail "'${1-}' is no host file that can be read; usage: scripts/mpi_hosts.sh HOSTFILE [flags]"
hosts=$1
shift
python=${PYTHON:-python}
command -v "$python" >/dev/null || fail "there is no command '$python': set PYTHON to your environment's python"

# Every host with its number of ranks, which the two MPIs write and take for granted differently.
named=()
ranks=0
while read -r line || [ -n "$line" ]; do
    line=${line%%#*}
    line=${line%$'\r'}
    [[ $line =~ ^[[:space:]]*$ ]] && continue
    if ! [[ $line =~ ^[[:space:]]*([A-Za-z0-9._-]+)(([[:space:]]+slots=|:)([1-9][0-9]{0,3}))?[[:space:]]*$ ]]; then
        fail "$hosts: '$line' is no host with a number of ranks; write it as node1 slots=2, node1:2 or node1"
    fi
    count=${BASH_REMATCH[4]:-1}
    named+=("${BASH_REMATCH[1]} $count")
    ranks=$((ranks + count))
done <"$hosts"
[ "$ranks" -ge 3 ] || fail "$hosts gives $ranks ranks; Conductor, a prefill and a decoding instance need at least 3"

# mpiexec with the options that its MPI needs, as the command itself would start it.
options=$("$python" -c "
import sys
from mooncake_jax.cluster.launch import mpiexec_command
print(*mpiexec_command(int(sys.argv[1])))" "$ranks") || fail "'$python' cannot import mooncake_jax, or has no mpiexec"
read -ra mpiexec <<<"$options"
written=$(mktemp)
trap 'rm -f "$written"' EXIT
case " ${mpiexec[*]} " in
*" ulfm "*)
    printf '%s\n' "${named[@]/ / slots=}" >"$written"
    file_option=--hostfile
    ;;
*)
    printf '%s\n' "${named[@]/ /:}" >"$written"
    file_option=-f
    ;;
esac
# shellcheck disable=SC2086  # several options in one variable
"${mpiexec[@]}" "$file_option" "$written" ${MPIEXEC_OPTIONS:-} "$python" -m mooncake_jax replay "$@"
