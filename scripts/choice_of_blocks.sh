#!/usr/bin/env bash
# Which settings make block selection find distant tokens: train small models at 8,192 tokens (scripts/linux_corpus.sh).
#
#     bash scripts/choice_of_blocks.sh CORPUS RUNS SEED VARIANT...
#
# A VARIANT is words joined by "+": base (the paper: MLP compression of 32 tokens, separate compressed keys), l16 (compressed
# blocks of 16), tie (compress_selected_keys), mean (mean compression), s32 (select 32 blocks of 32 instead of 16 of 64),
# shared (one K/V set), free (no forced first block, one local block), dense. `tie+l16+mean` is the preset m7c with
# compressed scores. All variants of one call run at once: start CUDA MPS first. Training takes an H200 95 s for three
# variants and 180 s for four, plus evaluation. FLAGS: more flags for tercet train. Results: docs/results/block-settings.md.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,10p' "$0" >&2; exit 2; }
corpus=$1 runs=$2 seed=$3
shift 3
python=${PYTHON:-python3}

flags_of() { # variant -> preset and flags
    local word preset=m7c block=32 phi=mlp keys=no_compress_selected_keys flags=""
    for word in ${1//+/ }; do
        case $word in
        base) ;;
        l16) block=16 ;;
        tie) keys=compress_selected_keys ;;
        mean) phi=mean ;;
        s32) flags+=" --model.nsa.select_block 32 --model.nsa.select_count 32" ;;
        shared) flags+=" --model.shared_kv" ;;
        free) flags+=" --model.nsa.select_initial 0 --model.nsa.select_local 1" ;;
        dense) preset=m7c-dense ;;
        *) echo "choice_of_blocks: variant $1: the word $word is unknown" >&2; return 2 ;;
        esac
    done
    # Always set these: the preset already has some of them.
    flags+=" --model.nsa.compress_block $block --model.compression $phi --model.$keys --model.selector compressed"
    [ $preset = m7c-dense ] && flags+=" --train.cuda_graph off" || flags+=" --train.cuda_graph on"
    echo "$preset$flags"
}

one() { # variant
    local run="$runs/$1-$seed"
    "$python" -m tercet train --preset $(flags_of "$1") --run.seed "$seed" --run.dir "$run" \
        --data.source shards --data.path "$corpus" --data.tokenizer byte --data.seq_len 8192 --data.shuffle_sequences 1024 \
        --model.dim 384 --model.layers 6 --model.heads 6 --model.kv_heads 1 --model.ffn_dim 1024 \
        --train.steps 2000 --train.tokens_per_step 32768 --train.micro_batch 4 --train.lr 2e-3 --train.warmup_steps 100 \
        --train.weight_decay 0.1 --train.val_every 500 --train.val_tokens 1048576 --train.sample_tokens 0 \
        --checkpoint.every 0 --log.every 20 --log.progress off ${FLAGS:-} > "$run.log" 2>&1
    "$python" -m tercet eval perplexity "$run" --sequences 256 --batch 8 > "$runs/perplexity-$1-$seed.txt"
    "$python" -m tercet eval needle "$run" --style text --lengths 1024 2048 4096 8192 --depths 0.2 0.4 0.6 0.8 0.9 --trials 16 --batch 8 \
        > "$runs/needle-$1-$seed.txt"
    echo "$1, seed $seed: held-out loss $(tail -n 1 "$run/val.csv" | cut -d, -f2)"
}

for variant in "$@"; do flags_of "$variant" > /dev/null; done # check all variants before training
mkdir -p "$runs"
for variant in "$@"; do one "$variant" & done
failed=0
for job in $(jobs -p); do wait "$job" || failed=$?; done
exit $failed
