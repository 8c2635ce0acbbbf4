#!/usr/bin/env bash
# One host's part of a run. The same line on every host, within ten minutes of each other:
#
#     HEAD=host-0 RUN=/shared/runs/a ./torchrun_two_hosts.sh --model llama3.2-1b --data /shared/texts --steps 20000
#
# What stands behind the script are flags of `quantshard train`; `--auto-resume` is added, so the line both begins a
# run and goes on with it. Exit code: 0 when all steps are done, 75 when some are left (stopped by SIGTERM, and saved),
# another after a failure. It does not start itself again: SLURM, Kubernetes or systemd do that.
set -uo pipefail

: "${HEAD:?the name of one of the hosts, where they all meet}"
: "${RUN:?the folder of the run, on a file system that all hosts share}"
CHECKPOINTS="${CHECKPOINTS:-}"      # a folder or a URL for them; else they are in RUN
NODES="${NODES:-2}"                 # or MIN:MAX, as 1:2: with hosts that come and go
PROCESSES="${PROCESSES:-gpu}"       # of a host: a number, or one for each GPU
PORT="${PORT:-29400}"               # of HEAD, free, and open to the others
JOB="${JOB:-$(basename "$RUN")}"    # the same on all hosts, another for each run that meets at HEAD:PORT
RESTARTS="${RESTARTS:-3}"           # after processes failed, or hosts were lost; hosts that join do not count
GRACE="${GRACE:-120}"               # seconds that processes have after SIGTERM to end their step and save
MEETING="${MEETING:-last_call_timeout=30}"   # of torchrun's --rdzv-conf: for how long more than MIN hosts are waited for
PYTHON="${PYTHON:-python}"

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="$GRACE"   # PyTorch 2.11 knows it not, and gives 30 s
# A meeting after the first has a new address of the first process. By default an agent that was there keeps the old one,
# and one that joins waits in vain for the new (seen with PyTorch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

"$PYTHON" -m torch.distributed.run \
    --nnodes "$NODES" --nproc-per-node "$PROCESSES" --max-restarts "$RESTARTS" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "$JOB" --rdzv-conf "$MEETING" \
    -m quantshard train --run-dir "$RUN" --auto-resume ${CHECKPOINTS:+--checkpoints "$CHECKPOINTS"} "$@" &
agent=$!
stopped=
trap 'stopped=1; kill -TERM "$agent"' TERM INT   # a shell that is the first process of a container would not hand it on
wait "$agent"
code=$?
while kill -0 "$agent" 2>/dev/null; do           # the trap ends a wait, not the agent
    wait "$agent"
    code=$?
done

# torchrun ends with 1 after SIGTERM though all was saved, and with 0 if another host was stopped: only the run knows
"$PYTHON" -m quantshard status "$RUN" ${CHECKPOINTS:+--checkpoints "$CHECKPOINTS"}
left=$?
if [ "$code" -ne 0 ] && [ -z "$stopped" ] && [ "$left" -eq 75 ]; then
    exit "$code"
fi
exit "$left"
