#!/usr/bin/env bash
# Train and evaluate the runs of docs/results/quality.md, one phase at a time.
#
#     bash scripts/quality.sh nsa CORPUS RUNS STEPS [flags of tercet train]
#     bash scripts/quality.sh dense CORPUS RUNS STEPS [flags]                    # dense baseline
#     bash scripts/quality.sh interrupted-nsa CORPUS RUNS STEPS [flags]          # SIGTERM at 43%, then resume
#     bash scripts/quality.sh interrupted-dense CORPUS RUNS STEPS [flags]        # interrupt both models or neither
#     bash scripts/quality.sh evals CORPUS RUNS                                  # loss by position and needles, both models
#     bash scripts/quality.sh seeds CORPUS RUNS SEED...                          # tiny and tiny-dense, one core each: seed noise
#
# CORPUS: shards from scripts/linux_corpus.sh. On an H200 a step takes 0.14 s (`nsa`) or 0.19 s (`dense`); start-up, checkpoints
# and validation add 80 s or 35 s, the evaluations up to 60 s.
set -euo pipefail
usage() { sed -n '2,12p' "$0" >&2; exit 2; }
[ $# -ge 3 ] || usage
phase=$1 corpus=$2 runs=$3
shift 3
python=${PYTHON:-python3}
data=(--data.source shards --data.path "$corpus" --data.tokenizer byte)

train() { # kind, steps, flags
    local kind=$1 steps=$2 suffix=""
    shift 2
    [ "$kind" = nsa ] || suffix=-dense
    "$python" -m tercet train --preset "m7c$suffix" --run.name "m7c-8k$suffix" --run.dir "$runs/quality-$kind" "${data[@]}" \
        --data.seq_len 8192 --data.shuffle_sequences 1024 --train.steps "$steps" --train.micro_batch 8 --train.lr 1e-3 \
        --train.warmup_steps 100 --train.weight_decay 0.1 --train.val_every $((steps / 8)) --train.val_tokens 1048576 \
        --checkpoint.every $((steps / 4)) --checkpoint.keep 2 --log.every 10 --health.memory_every 500 --resume auto "$@"
}
logged() { tail -n 1 "$runs/quality-$1/training.csv" 2>/dev/null | cut -d, -f1 | grep -E '^[0-9]+$' || echo 0; }

case $phase in
nsa | dense)
    [ $# -ge 1 ] || usage
    train "$phase" "$@"
    ;;
interrupted-nsa | interrupted-dense)
    [ $# -ge 1 ] || usage
    kind=${phase#interrupted-}
    train "$kind" "$@" &
    while kill -0 $! 2>/dev/null && [ "$(logged "$kind")" -lt $(($1 * 43 / 100)) ]; do sleep 0.5; done
    # $! is the subshell of the function; the trainer is its child.
    pkill -TERM -P $! 2>/dev/null || true
    wait $! || echo "stopped with exit code $? after step $(logged "$kind")"
    train "$kind" "$@"
    ;;
evals)
    for kind in nsa dense; do
        run=$runs/quality-$kind
        "$python" -m tercet eval perplexity "$run" --sequences 256 --batch 8 --dtype bfloat16 > "$runs/perplexity-$kind.txt" &
        "$python" -m tercet eval needle "$run" --style text --lengths 1024 2048 4096 8192 --trials 16 --batch 8 --dtype bfloat16 \
            --depths 0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1.0 > "$runs/needle-$kind.txt" &
    done
    wait
    ls -l "$runs"/{perplexity,needle}-{nsa,dense}.txt
    ;;
seeds)
    for seed in "$@"; do for preset in tiny tiny-dense; do echo "$preset $seed"; done; done |
        xargs -P "$(nproc)" -L 1 sh -c '"$0" -m tercet train --preset "$3" --run.seed "$4" --run.dir "$2/$3-$4" --run.device cpu --run.threads 1 \
            --data.source shards --data.path "$1" --data.tokenizer byte --data.shuffle_sequences 4096 --train.steps 800 --train.val_every 0 --train.val_tokens 131072' \
            "$python" "$corpus" "$runs"
    tail -qn 1 "$runs"/tiny*/val.csv
    ;;
*) usage ;;
esac
