#!/usr/bin/env bash
# mooncake-jax replay on the hosts of a host file, with Open MPI or MPICH.
#
#     scripts/mpi_hosts.sh HOSTFILE [flags of mooncake-jax replay]
#
# HOSTFILE has a host a line with the number of its ranks, as this MPI writes it: "node1 slots=2" (Open MPI) or
# "node1:2" (MPICH); one rank if none is given. Ranks fill the hosts in order: Conductor, then the stages of the
# first prefill instance, of the second, ..., then the decoding instances. So two prefill instances of two stages and
# one decoding instance, a GPU host for each rank that computes, are
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

if [ $# -lt 1 ] || [ ! -r "$1" ]; then
    echo "mpi_hosts.sh: '${1-}' is no host file that can be read; usage: scripts/mpi_hosts.sh HOSTFILE [flags]" >&2
    exit 2
fi
hosts=$1
shift
python=${PYTHON:-python}

ranks=$(sed 's/#.*//' "$hosts" | awk 'NF { n = 1; if (match($0, /(slots=|:)[0-9]+/)) { n = substr($0, RSTART, RLENGTH); gsub(/[^0-9]/, "", n) } total += n } END { print total + 0 }')
if [ "$ranks" -lt 3 ]; then
    echo "mpi_hosts.sh: $hosts gives $ranks ranks; Conductor, a prefill and a decoding instance need at least 3" >&2
    exit 2
fi

# mpiexec with the options that its MPI needs, as the command itself would start it.
read -ra mpiexec < <("$python" -c "
import sys
from mooncake_jax.cluster.launch import mpiexec_command
print(*mpiexec_command(int(sys.argv[1])))" "$ranks")
case " ${mpiexec[*]} " in
*" ulfm "*) file_option=--hostfile ;;
*) file_option=-f ;;
esac
# shellcheck disable=SC2086  # several options in one variable
exec "${mpiexec[@]}" "$file_option" "$hosts" ${MPIEXEC_OPTIONS:-} "$python" -m mooncake_jax replay "$@"
