#!/bin/bash
# One job of riptide on Slurm: Ray starts on all nodes, the first one runs the job, and Ray ends with it.
#
#   sbatch --nodes=4 cluster/slurm.sh encode-corpus --store /shared/squad --encoder /shared/models/minilm --gpus 1 --cpus 16
#
# The store is a folder that all nodes mount, or a bucket. riptide is installed in an environment that all nodes see, and active
# when you type sbatch. Slurm queues the job again after the loss of a node; submit it again after its time limit: it resumes.
#
#SBATCH --job-name=riptide
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Ray stops every Ray of the user on a node when the job ends, so the nodes are not shared.
#SBATCH --exclusive

set -euo pipefail

if [ $# -eq 0 ]; then
  echo "error: expected a job and its options, for example: sbatch cluster/slurm.sh encode-corpus --store FOLDER …" >&2
  exit 2
fi

# The token protects Ray's ports from other users of the network. Home folders are shared and private.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME/.ray/auth_token"
[ -s "$RAY_AUTH_TOKEN_PATH" ] || env -u RAY_AUTH_TOKEN_PATH ray get-auth-token --generate > /dev/null

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*}
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
  ray symmetric-run --address "$first:6379" --min-nodes "$SLURM_JOB_NUM_NODES" --dashboard-host=127.0.0.1 -- riptide "$@"
