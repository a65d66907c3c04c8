#!/usr/bin/env bash
# Is sparse attention what makes the difference? Controls, seeds, learning rates, a second corpus, equal time.
#
#     bash scripts/evidence.sh train KIND CORPUS RUNS SEED [flags]      # 200M tokens at 8,192, or two epochs if fewer
#     bash scripts/evidence.sh evals KIND CORPUS RUNS SEED              # loss by position, and needles
#     bash scripts/evidence.sh rates KIND CORPUS RUNS [flags]           # a small model, three learning rates at once
#     bash scripts/evidence.sh optimizers CORPUS RUNS [flags]           # m7c with AdamW, and with Muon at two learning rates, at once
#     bash scripts/evidence.sh time KIND CORPUS RUNS LENGTH SECONDS [flags]   # as many steps as fit the time
#     bash scripts/evidence.sh production CORPUS RUNS [flags]           # SIGTERM at 30%, kill -9 at 65%, dense, report
#     bash scripts/evidence.sh parameters                               # of every kind
#
# KIND: nsa (m7c), learned (with a learned selector), two-branch (learned, without the compressed branch), one-branch
# (block-sparse with gates), block-sparse (one branch, no gates, a learned selector), all-blocks (NSA that reads every
# block), random-blocks, dense, or dense-matched (a wider FFN: as many parameters as nsa; MATCHED=2224 for learned).
# CORPUS: shards from scripts/linux_corpus.sh or scripts/manuals_corpus.sh. LR: learning rate (1e-3). STEPS: instead of
# 200M tokens. LIMIT: seconds after which a run saves and stops (1380); the same command continues it.
# On an H200 a step of nsa takes 0.14 s at 8,192 tokens. scripts/evidence_tables.py collects the results.
set -euo pipefail
usage() { sed -n '2,17p' "$0" >&2; exit 2; }
[ $# -ge 1 ] || usage
phase=$1
shift
python=${PYTHON:-python3}
LR=${LR:-1e-3} MATCHED=${MATCHED:-2192} LIMIT=${LIMIT:-1380}
# Half, once and twice what the Step Law (arXiv 2503.04715), 1.79 · N^-0.713 · D^0.307, gives for 10M parameters and 66M
# tokens. It gives 1.5e-3 for m7c and 200M tokens: LR is the best multiple of that.
SMALL_RATES=${SMALL_RATES:-2.2e-3 4.4e-3 8.8e-3}
# Of Muon's matrices; the rest learns with AdamW at LR. Its updates are scaled to AdamW's size (train.muon.adjust_lr_fn).
MUON_RATES=${MUON_RATES:-1e-3 3e-3}

# shellcheck source=scripts/kinds.sh
. "$(dirname "$0")/kinds.sh"

of_corpus() { # field of the manifest
    "$python" -c 'import json, sys; m = json.load(open(sys.argv[1])); print({**m, **m["tokenizer"]}[sys.argv[2]])' "$corpus/manifest.json" "$1"
}

run() { # folder, kind, length, steps, flags: train it, or continue
    local folder=$1 kind=$2 length=$3 steps=$4 words tokenizer=byte
    words=$(flags_of_kind "$kind" "$length")
    shift 4
    [ ! -f "$corpus/tokenizer.json" ] || tokenizer=$corpus/tokenizer.json
    # shellcheck disable=SC2086
    timeout --signal TERM "$LIMIT" "$python" -m tercet train --preset $words --run.name "$(basename "$folder")" \
        --run.dir "$folder" --data.source shards --data.path "$corpus" --data.tokenizer "$tokenizer" \
        --model.vocab_size "$(of_corpus vocab_size)" --data.seq_len "$length" --data.shuffle_sequences $((8388608 / length)) \
        --train.steps "$steps" --train.tokens_per_step 65536 --train.micro_batch $((65536 / length)) --train.lr "$LR" \
        --train.warmup_steps 100 --train.weight_decay 0.1 --train.val_every $(((steps + 11) / 12)) \
        --train.val_tokens 1048576 --train.sample_tokens 0 --checkpoint.every $(((steps + 3) / 4)) --checkpoint.keep 2 \
        --log.every 10 --health.memory_every 0 --resume auto "$@"
}

wait_for() { # process ids: fail if one of them did
    local failed=0 job
    for job in "$@"; do wait "$job" || failed=$?; done
    return $failed
}

last_loss() { tail -n 1 "$1/val.csv" | cut -d, -f2; }

whole_steps() { # 200M tokens, or two epochs
    echo "${STEPS:-$("$python" -c 'import sys; print(min(3052, 2 * int(0.98 * int(sys.argv[1])) // 65536))' "$(of_corpus tokens)")}"
}

logged() { tail -n 1 "$1/training.csv" 2>/dev/null | cut -d, -f1 | grep -E '^[0-9]+$' || echo 0; }

stop_at() { # signal, step, folder, kind, steps, flags: train in the background until the step, then send the signal
    local signal=$1 step=$2
    shift 2
    local folder=$1
    run "$@" &
    while kill -0 $! 2>/dev/null && [ "$(logged "$folder")" -lt "$step" ]; do sleep 0.5; done
    # $! is the subshell of the function, its child is timeout, and the trainer is that one's child.
    for child in $(pgrep -P $!); do pkill "-$signal" -P "$child" 2>/dev/null || true; done
    wait $! || echo "stopped by SIG$signal with exit code $? after step $(logged "$folder")"
}

case $phase in
train)
    [ $# -ge 4 ] || usage
    kind=$1 corpus=$2 runs=$3 seed=$4
    shift 4
    run "$runs/$(basename "$corpus")-$kind-$seed" "$kind" 8192 "$(whole_steps)" --run.seed "$seed" "$@"
    ;;
evals)
    [ $# -eq 4 ] || usage
    name=$(basename "$2")-$1-$4
    "$python" -m tercet eval perplexity "$3/$name" --seq-len 8192 --sequences 256 --batch 8 > "$3/$name/perplexity.txt" &
    first=$!
    "$python" -m tercet eval needle "$3/$name" --style text --lengths 1024 2048 4096 8192 --trials 16 --batch 8 \
        --depths 0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1.0 > "$3/$name/needle.txt"
    wait $first
    ;;
rates)
    [ $# -ge 3 ] || usage
    kind=$1 corpus=$2 runs=$3
    shift 3
    mkdir -p "$runs"
    jobs=()
    for LR in $SMALL_RATES; do
        folder=$runs/$(basename "$corpus")-$kind-small-$LR
        run "$folder" "$kind" 8192 "${STEPS:-2000}" --model.dim 384 --model.layers 6 --model.heads 6 --model.kv_heads 1 \
            --model.ffn_dim 1024 --train.tokens_per_step 32768 --train.micro_batch 4 --run.seed 1 "$@" > "$folder.log" 2>&1 &
        jobs+=($!)
    done
    failed=0
    wait_for "${jobs[@]}" || failed=$?
    for LR in $SMALL_RATES; do
        echo "$kind, learning rate $LR: $(last_loss "$runs/$(basename "$corpus")-$kind-small-$LR")"
    done
    exit $failed
    ;;
optimizers) # the same seed: the same weights at first, and the same text in the same order
    [ $# -ge 2 ] || usage
    corpus=$1 runs=$2 steps=${STEPS:-600}
    shift 2
    mkdir -p "$runs"
    run "$runs/adamw-$LR" nsa 8192 "$steps" --run.seed 1 "$@" > "$runs/adamw-$LR.log" 2>&1 &
    jobs=($!) names=("adamw-$LR")
    for rate in $MUON_RATES; do
        run "$runs/muon-$rate" nsa 8192 "$steps" --run.seed 1 --train.optimizer muon --train.muon.lr "$rate" "$@" \
            > "$runs/muon-$rate.log" 2>&1 &
        jobs+=($!) names+=("muon-$rate")
    done
    failed=0
    wait_for "${jobs[@]}" || failed=$?
    for name in "${names[@]}"; do echo "$name: validation loss $(last_loss "$runs/$name") after $(logged "$runs/$name") steps"; done
    exit $failed
    ;;
time)
    [ $# -ge 5 ] || usage
    kind=$1 corpus=$2 runs=$3 length=$4 seconds=$5
    shift 5
    folder=$runs/$(basename "$corpus")-$kind-$length-${seconds}s
    if [ ! -d "$folder" ] && [ -z "${STEPS:-}" ]; then # how long is a step?
        run "$folder-probe" "$kind" "$length" 60 --train.val_every 0 --checkpoint.every 0 --run.seed 1 "$@"
    fi
    steps=${STEPS:-$("$python" -c '
import csv, statistics, sys
rows = list(csv.DictReader(open(sys.argv[1])))
print(int(float(sys.argv[2]) / statistics.median(float(row["step_seconds"]) for row in rows[2:])))
' "$folder-probe/training.csv" "$seconds")}
    run "$folder" "$kind" "$length" "$steps" --model.rope_theta 500000 --run.seed 1 "$@"
    ;;
production)
    [ $# -ge 2 ] || usage
    corpus=$1 runs=$2
    shift 2
    steps=$(whole_steps)
    stop_at TERM $((steps * 30 / 100)) "$runs/production" nsa 8192 "$steps" --run.seed 1 "$@"
    stop_at KILL $((steps * 65 / 100)) "$runs/production" nsa 8192 "$steps" --run.seed 1 "$@"
    run "$runs/production" nsa 8192 "$steps" --run.seed 1 "$@"
    run "$runs/production-dense" dense 8192 "$steps" --run.seed 1 "$@"
    "$python" -m tercet report "$runs/production" --baseline "$runs/production-dense"
    ;;
parameters)
    for kind in nsa learned two-branch one-branch block-sparse all-blocks random-blocks dense dense-matched; do
        # shellcheck disable=SC2046
        echo "$kind: $("$python" -m tercet plan --gpu H200 --preset $(flags_of_kind "$kind" 8192) | grep ^parameters)"
    done
    ;;
*) usage ;;
esac
