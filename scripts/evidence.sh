#!/usr/bin/env bash
# Learning rates, optimizers, noise between seeds, and a production run. (Controls and seeds at `m7c`'s size:
# scripts/retrieval.sh.)
#
#     bash scripts/evidence.sh seeds CORPUS RUNS SEED...                # tiny and its dense baselines on a CPU, one core each; RUNS/seeds.csv
#     bash scripts/evidence.sh rates KIND CORPUS RUNS [flags]           # a small model, three learning rates at once
#     bash scripts/evidence.sh optimizers CORPUS RUNS [flags]           # m7c with AdamW, and with Muon at two learning rates, at once
#     bash scripts/evidence.sh production CORPUS RUNS [flags]           # two-branch: SIGTERM at 30%, kill -9 at 65%; dense; report
#     bash scripts/evidence.sh keep RUNS                                # evaluate both, and copy files for the tables
#     bash scripts/evidence.sh parameters                               # of every kind
#
# KIND: see scripts/kinds.sh. CORPUS: shards from scripts/linux_corpus.sh or scripts/manuals_corpus.sh. LR: learning rate
# (1e-3; of tiny 3e-3). STEPS: of a run. LIMIT: seconds after which a run saves and stops (1380); the same command continues it.
set -euo pipefail
usage() { sed -n '2,13p' "$0" >&2; exit 2; }
[ $# -ge 1 ] || usage
phase=$1
shift
python=${PYTHON:-python3}
LIMIT=${LIMIT:-1380}
# Half, once and twice what the Step Law (arXiv 2503.04715), 1.79 · N^-0.713 · D^0.307, gives for 10M parameters and 66M
# tokens. For m7c and 200M tokens it gives 1.5e-3.
SMALL_RATES=${SMALL_RATES:-2.2e-3 4.4e-3 8.8e-3}
# Of Muon's matrices; the rest learns with AdamW at LR. Its updates are scaled to AdamW's size (train.muon.adjust_lr_fn).
MUON_RATES=${MUON_RATES:-1e-3 3e-3}

# shellcheck source=scripts/kinds.sh
. "$(dirname "$0")/kinds.sh"

of_corpus() { # field of the manifest
    "$python" -c 'import json, sys; m = json.load(open(sys.argv[1])); print({**m, **m["tokenizer"]}[sys.argv[2]])' "$corpus/manifest.json" "$1"
}

data_flags() { # sets data
    local tokenizer=byte
    [ ! -f "$corpus/tokenizer.json" ] || tokenizer=$corpus/tokenizer.json
    data=(--data.source shards --data.path "$corpus" --data.tokenizer "$tokenizer" --model.vocab_size "$(of_corpus vocab_size)")
}

run() { # folder, kind, length, steps, flags: train it, or continue
    local folder=$1 kind=$2 length=$3 steps=$4 words data
    words=$(flags_of_kind "$kind" "$length")
    shift 4
    data_flags
    # shellcheck disable=SC2086
    timeout --signal TERM "$LIMIT" "$python" -m tercet train --preset $words --run.name "$(basename "$folder")" \
        --run.dir "$folder" "${data[@]}" --data.seq_len "$length" --data.shuffle_sequences $((8388608 / length)) \
        --train.steps "$steps" --train.tokens_per_step 65536 --train.micro_batch $((65536 / length)) --train.lr "${LR:-1e-3}" \
        --train.warmup_steps 100 --train.weight_decay 0.1 --train.val_every $(((steps + 11) / 12)) \
        --train.val_tokens 1048576 --train.sample_tokens 0 --checkpoint.every $(((steps + 3) / 4)) --checkpoint.keep 2 \
        --log.every 10 --health.memory_every 0 --resume auto "$@"
}

last_loss() { tail -n 1 "$1/val.csv" | cut -d, -f2; }

whole_steps() { # 200M tokens, or two epochs
    echo "${STEPS:-$("$python" -c 'import sys; print(min(3052, 2 * int(0.98 * int(sys.argv[1])) // 65536))' "$(of_corpus tokens)")}"
}

logged() { tail -n 1 "$1/training.csv" 2>/dev/null | cut -d, -f1 | grep -E '^[0-9]+$' || echo 0; }

stop_at() { # signal, step, folder, kind, length, steps, flags: train in the background until the step, then send the signal
    local signal=$1 step=$2
    shift 2
    local folder=$1
    [ "$(logged "$folder")" -lt "$step" ] || return 0
    run "$@" &
    while kill -0 $! 2>/dev/null && [ "$(logged "$folder")" -lt "$step" ]; do sleep 0.5; done
    # $! is the subshell of the function, its child is timeout, and the trainer is that one's child.
    for child in $(pgrep -P $!); do pkill "-$signal" -P "$child" 2>/dev/null || true; done
    wait $! || echo "stopped by SIG$signal with exit code $? after step $(logged "$folder")"
}

case $phase in
seeds)
    [ $# -ge 3 ] || usage
    corpus=$1 runs=$2
    shift 2
    data_flags
    # dense-matched: as many parameters as tiny
    declare -A presets=([nsa]=tiny [dense]=tiny-dense [dense-matched]="tiny-dense --model.ffn_dim 522")
    for seed in "$@"; do
        jobs=()
        for kind in "${!presets[@]}"; do
            # shellcheck disable=SC2086
            "$python" -m tercet train --preset ${presets[$kind]} --run.seed "$seed" --run.dir "$runs/$kind-$seed" \
                --run.device cpu --run.threads 1 "${data[@]}" --data.shuffle_sequences 4096 --train.steps 800 \
                --train.val_every 0 --train.val_tokens 131072 --train.lr "${LR:-3e-3}" &
            jobs+=($!)
        done
        wait_for "${jobs[@]}"
        for kind in "${!presets[@]}"; do
            echo "$(basename "$corpus"),$kind,$seed,${LR:-3e-3},800,$(last_loss "$runs/$kind-$seed")" | tee -a "$runs/seeds.csv"
        done
    done
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
    run "$runs/adamw" learned 8192 "$steps" --run.seed 1 "$@" > "$runs/adamw.log" 2>&1 &
    jobs=($!) names=("adamw")
    for rate in $MUON_RATES; do
        run "$runs/muon-$rate" learned 8192 "$steps" --run.seed 1 --train.optimizer muon --train.muon.lr "$rate" "$@" \
            > "$runs/muon-$rate.log" 2>&1 &
        jobs+=($!) names+=("muon-$rate")
    done
    failed=0
    wait_for "${jobs[@]}" || failed=$?
    for name in "${names[@]}"; do echo "$name: validation loss $(last_loss "$runs/$name") after $(logged "$runs/$name") steps"; done
    exit $failed
    ;;
production)
    [ $# -ge 2 ] || usage
    corpus=$1 runs=$2
    shift 2
    steps=$(whole_steps)
    stop_at TERM $((steps * 30 / 100)) "$runs/production" two-branch 8192 "$steps" --run.seed 1 "$@"
    stop_at KILL $((steps * 65 / 100)) "$runs/production" two-branch 8192 "$steps" --run.seed 1 "$@"
    run "$runs/production" two-branch 8192 "$steps" --run.seed 1 "$@"
    run "$runs/production-dense" dense 8192 "$steps" --run.seed 1 "$@"
    "$python" -m tercet report "$runs/production" --baseline "$runs/production-dense"
    ;;
keep)
    [ $# -eq 1 ] || usage
    to=$(dirname "$0")/../docs/results/production
    mkdir -p "$to"
    for name in production production-dense; do
        [ -f "$1/$name-perplexity.txt" ] || "$python" -m tercet eval perplexity "$1/$name" --seq-len 8192 \
            --sequences 256 --batch 8 --dtype bfloat16 > "$1/$name-perplexity.txt"
        keep_run "$1/$name" "$to/$name"
        cut -d, -f1,2,4 "$1/$name/training.csv" > "$to/$name-training.csv"
        cp "$1/$name-perplexity.txt" "$to"
    done
    cp "$1/production/report/report.md" "$to"
    # losses of the steps that were lost by kill -9, and of the same steps after the resume
    "$python" - "$1/production" > "$to/repeated.csv" <<'END'
import json, pathlib, sys
logs = [pathlib.Path(sys.argv[1], name).read_text() for name in ("superseded_rank0.jsonl", "events_rank0.jsonl")]
events = [[json.loads(line) for line in log.splitlines()] for log in logs]
lost, again = ({(e["step"], e["kind"]): e["loss"] for e in log if e["kind"] in ("step", "validation")} for log in events)
print("step,kind,before,after", *(f"{step},{kind},{lost[step, kind]},{again[step, kind]}" for step, kind in lost), sep="\n")
END
    without_folders "$1/production/config.toml" "$1" "$to"/*
    ;;
parameters)
    for kind in compressed learned two-branch one-branch block-sparse all random dense dense-matched; do
        # shellcheck disable=SC2046
        echo "$kind: $("$python" -m tercet plan --gpu H200 --preset $(flags_of_kind "$kind" 8192) | grep ^parameters)"
    done
    ;;
*) usage ;;
esac
