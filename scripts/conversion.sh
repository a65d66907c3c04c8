#!/usr/bin/env bash
# What does a dense model lose when its attention becomes sparse, and how much training brings it back?
#
#     STAGES=8192:1700 bash scripts/retrieval.sh train dense CORPUS RUNS --model.rope_max_wavelength 0
#     bash scripts/conversion.sh convert KIND CORPUS RUNS [flags of tercet train]
#     bash scripts/conversion.sh evals RUNS
#
# KIND: block-sparse (blocks chosen by the means of their keys), learned (block-sparse, with learned selectors that
# first learn alone for 76 steps), nsa (three branches) or continued (dense, for comparison). Trains on 50M tokens and
# keeps the checkpoints after 5M, 20M and 50M. CORPUS: shards from scripts/linux_corpus.sh. All models are evaluated on
# the validation text of RUNS/dense.
set -euo pipefail
usage() { sed -n '2,11p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
phase=$1
shift
python=${PYTHON:-python3} LENGTH=${LENGTH:-8192} STEPS=${STEPS:-760} EVERY=${EVERY:-76}
tercet() { "$python" -m tercet "$@"; }

case $phase in
convert)
    [ $# -ge 3 ] || usage
    kind=$1 corpus=$2 runs=$3 start=$3/$1-start
    shift 3
    case $kind in
    block-sparse) own=(--attention block-sparse) ;;
    learned) own=(--attention block-sparse --selector learned) ;;
    nsa) own=(--attention nsa --compression mean --nsa.window 128) ;;
    continued) own=(--attention dense) ;;
    *) usage ;;
    esac
    [ -d "$runs/dense-hf" ] || tercet export hf "$runs/dense" "$runs/dense-hf" --format llama
    [ -d "$start" ] || tercet import hf "$runs/dense-hf" "$start" --seq_len "$LENGTH" --nsa.compress_block 16 \
        --nsa.compress_stride 16 "${own[@]}"
    train() { # folder, flags
        tercet train --config "$start/config.toml" --run.name "$(basename "$1")" --run.dir "$1" --run.seed 7 \
            --data.source shards --data.path "$corpus" --data.tokenizer byte --data.shuffle_sequences 256 \
            --data.retrieval 0.3 --train.tokens_per_step 65536 --train.micro_batch $((65536 / LENGTH)) \
            --train.schedule constant --train.warmup_steps 10 --train.weight_decay 0.1 --train.val_every 0 \
            --health.memory_every 0 --resume auto "${@:2}"
    }
    from=()
    if [ "$kind" = learned ]; then
        train "$runs/learned-warmup" --train.selector.only --train.lr 1e-3 --train.steps "$EVERY" "$@"
        from=(--train.init_from "$runs/learned-warmup")
    fi
    train "$runs/$kind" --train.lr 2e-4 --train.steps "$STEPS" --checkpoint.every "$EVERY" --checkpoint.keep 0 \
        ${from[@]+"${from[@]}"} "$@"
    ;;
evals)
    runs=$1
    evaluate() { # model, name
        tercet eval perplexity "$1" --data-of "$runs/dense" --seq-len "$LENGTH" --sequences "${SEQUENCES:-128}" \
            --batch 8 > "$runs/$2-perplexity.txt"
        tercet eval needle "$1" --data-of "$runs/dense" --style text --trials "${TRIALS:-8}" \
            --lengths $((LENGTH / 8)) $((LENGTH / 4)) $((LENGTH / 2)) "$LENGTH" \
            --depths 0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1.0 > "$runs/$2-needle.txt"
    }
    evaluate "$runs/dense" dense &
    [ ! -d "$runs/learned-warmup" ] || evaluate "$runs/learned-warmup" learned-warmup &
    for kind in block-sparse learned nsa continued; do
        [ -d "$runs/$kind" ] || continue
        evaluate "$runs/$kind-start" "$kind-0" &
        for step in "$EVERY" $((EVERY * 4)) "$STEPS"; do
            evaluate "$runs/$kind/checkpoints/$(printf 'step-%08d' "$step")" "$kind-$step" &
        done
        wait
    done
    wait
    ;;
*) usage ;;
esac
