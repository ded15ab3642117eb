#!/usr/bin/env bash
# Gives each rank of a machine GPUs of its own: put it before the command that mpiexec or srun starts.
#
#     mpiexec --with-ft ulfm --bind-to none -n 4 scripts/gpu_rank.sh 2 mooncake-jax replay --prefill=1x2 --tp=2
#
# Rank 0, Conductor, gets none; the others two each, in order: here 0 and 1, 2 and 3 for the stages, 4 and 5 for the
# decoding instance. Where a rank has a host to itself it is not needed: the rank takes the host's first GPUs.
set -euo pipefail

each=${1-}
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID-}}}
place=${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-${SLURM_LOCALID-}}} # among the ranks of this host
if ! [[ $each =~ ^[1-9][0-9]*$ ]] || [ $# -lt 2 ]; then
    echo "gpu_rank.sh: '$each' is no number of GPUs; usage: gpu_rank.sh GPUS_PER_RANK COMMAND..." >&2
    exit 2
fi
if [ -z "$rank" ] || [ -z "$place" ]; then
    echo "gpu_rank.sh: no rank in the environment: start it under mpiexec or srun" >&2
    exit 2
fi
shift
if [ "$rank" -eq 0 ]; then
    CUDA_VISIBLE_DEVICES=
else
    if [ "$rank" -eq "$place" ]; then # ranks fill the hosts in order: Conductor is on this one
        place=$((place - 1))
    fi
    CUDA_VISIBLE_DEVICES=$(seq -s, $((place * each)) $(((place + 1) * each - 1)))
fi
export CUDA_VISIBLE_DEVICES
exec "$@"
