#!/usr/bin/env bash
# What does a dense model lose when its attention becomes sparse, and how much training brings it back?
#
#     bash scripts/retrieval.sh train dense CORPUS RUNS                # may be stopped after step 1,700
#     bash scripts/conversion.sh convert KIND CORPUS RUNS [flags of tercet train]
#     bash scripts/conversion.sh evals RUNS [dense|KIND …]             # default: all that are there
#     bash scripts/conversion.sh lengthen CORPUS RUNS [flags]          # learned, on to 32k and 64k: RUNS/lengthened
#     bash scripts/retrieval.sh evals lengthened RUNS
#
# Converts RUNS/dense as it was after step 1,700, the end of its training at length 8,192; writes RUNS/conversion.
# KIND: block-sparse (blocks chosen by the means of their keys), learned (block-sparse, with learned selectors that
# first learn alone for 76 steps), nsa (three branches, compressed scores) or continued (dense, for comparison). One run
# of 50M tokens at a constant learning rate; its checkpoints after 5M, 20M and 50M are points of one curve, to be
# compared with `continued` after as many. All models are evaluated on the validation text of RUNS/dense; with `dense`
# also RUNS/learned of scripts/retrieval.sh, NSA trained from scratch, after the same step.
set -euo pipefail
usage() { sed -n '2,15p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
phase=$1
shift
python=${PYTHON:-python3} LENGTH=${LENGTH:-8192} FROM=${FROM:-1700} STEPS=${STEPS:-760} EVERY=${EVERY:-76}
STAGES=${STAGES:-8192:304 32768:150 65536:250} # of lengthen
tercet() { "$python" -m tercet "$@"; }
checkpoint() { printf '%s/checkpoints/step-%08d' "$1" "$2"; } # run, step

import_dense() { # kind: RUNS/dense with other attention, in $out/KIND-start
    local own blocks=(--nsa.compress_block 16 --nsa.compress_stride 16) start=$out/$1-start
    case $1 in
    block-sparse) own=(--attention block-sparse "${blocks[@]}") ;;
    learned) own=(--attention block-sparse --selector learned "${blocks[@]}") ;;
    nsa) own=(--attention nsa --compression mean --compress_selected_keys --nsa.window 128 "${blocks[@]}") ;;
    continued) own=(--attention dense) ;;
    *) usage ;;
    esac
    mkdir -p "$out"
    [ -d "$out/dense-hf" ] || tercet export hf "$(checkpoint "$runs/dense" "$FROM")" "$out/dense-hf" --format llama
    [ -d "$start" ] || tercet import hf "$out/dense-hf" "$start" --seq_len "$LENGTH" "${own[@]}"
}

train() { # kind, folder, flags
    tercet train --config "$out/$1-start/config.toml" --run.name "$(basename "$2")" --run.dir "$2" --run.seed 7 \
        --data.source shards --data.path "$corpus" --data.tokenizer byte --data.shuffle_sequences 256 \
        --data.retrieval 0.3 --train.tokens_per_step 65536 --train.micro_batch $((65536 / LENGTH)) \
        --train.warmup_steps 10 --train.weight_decay 0.1 --train.val_every 0 --health.memory_every 0 --resume auto "${@:3}"
}

warm_up() { # flags: selectors learn alone
    train learned "$out/learned-warmup" --train.schedule constant --train.selector.only --train.lr 1e-3 \
        --train.steps "$EVERY" "$@"
}

case $phase in
convert)
    [ $# -ge 3 ] || usage
    kind=$1 corpus=$2 runs=$3 out=$3/conversion from=()
    shift 3
    import_dense "$kind"
    if [ "$kind" = learned ]; then
        warm_up "$@"
        from=(--train.init_from "$out/learned-warmup")
    fi
    train "$kind" "$out/$kind" --train.schedule constant --train.lr 2e-4 --train.steps "$STEPS" \
        --checkpoint.every "$EVERY" --checkpoint.keep 0 ${from[@]+"${from[@]}"} "$@"
    ;;
lengthen)
    corpus=$1 runs=$2 out=$2/conversion
    shift 2
    import_dense learned
    warm_up "$@"
    # shellcheck disable=SC2086
    train learned "$runs/lengthened" --train.init_from "$out/learned-warmup" --train.lr 2e-4 --train.stages $STAGES \
        --checkpoint.every 0 "$@"
    ;;
evals)
    runs=$1 out=$1/conversion pids=()
    shift
    evaluate() { # model, name
        tercet eval perplexity "$1" --data-of "$runs/dense" --seq-len "$LENGTH" --sequences "${SEQUENCES:-128}" \
            --batch 8 > "$out/$2-perplexity.txt"
        tercet eval needle "$1" --data-of "$runs/dense" --style text --trials "${TRIALS:-16}" \
            --lengths $((LENGTH / 8)) $((LENGTH / 4)) $((LENGTH / 2)) "$LENGTH" \
            --depths 0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1.0 > "$out/$2-needle.txt"
    }
    start() { evaluate "$@" & pids+=($!); }
    if [ $# = 0 ]; then
        set -- dense
        for kind in block-sparse learned nsa continued; do
            [ ! -d "$out/$kind" ] || set -- "$@" "$kind"
        done
    fi
    for kind in "$@"; do
        if [ "$kind" = dense ]; then
            start "$(checkpoint "$runs/dense" "$FROM")" dense
            scratch=$(checkpoint "$runs/learned" "$FROM")
            [ ! -d "$scratch" ] || start "$scratch" scratch
        else
            [ "$kind" = continued ] || start "$out/$kind-start" "$kind-0"
            [ "$kind" != learned ] || start "$out/learned-warmup" learned-warmup
            for step in "$EVERY" $((EVERY * 4)) "$STEPS"; do
                start "$(checkpoint "$out/$kind" "$step")" "$kind-$step"
            done
        fi
        for pid in "${pids[@]}"; do wait "$pid"; done
        pids=()
    done
    ;;
*) usage ;;
esac
