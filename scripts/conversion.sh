#!/usr/bin/env bash
# What a dense model loses when its blocks are chosen by its own queries and keys: before training, after training on as
# many tokens as the dense model, and at longer contexts. docs/results/conversion.md shows the results.
#
#     bash scripts/conversion.sh MODEL TRAIN HELD_OUT OUT
#
# MODEL: a folder of transformers; TRAIN, HELD_OUT: folders of text. On an H200 20 minutes for SmolLM2-135M. What is there
# already is not done again. STEPS=80 LENGTHS="32768 65536" EXTEND_STEPS=40 BATCH=131072 TRAIN_FLAGS=… change the sizes.
set -euo pipefail
model=${1:?usage: conversion.sh MODEL TRAIN HELD_OUT OUT} train=$2 held=$3 out=$4
steps=${STEPS:-80} extend_steps=${EXTEND_STEPS:-40} batch=${BATCH:-131072}
seq_len=${SEQ_LEN:-8192} lengths=${LENGTHS-32768 65536} questions=${QUESTIONS:-80}
python=${PYTHON:-python3}
tercet() { "$python" -m tercet "$@"; }
results=$out/results
mkdir -p "$results"

recipe=(--train.lr 1e-4 --train.warmup_steps 10 --train.val_every 0 --train.tokens_per_step "$batch")

declare -A attention=([dense]=dense [own]=block-sparse)
for kind in dense own; do
    [ -d "$out/$kind" ] || tercet import hf "$model" "$out/$kind" --attention "${attention[$kind]}" --seq_len "$seq_len"
    tercet eval perplexity "$out/$kind" --data "$held" --seq_len "$seq_len" | tee "$results/loss-$kind.txt"
done
eos=$(sed -n 's/^eos_token = "\(.*\)"/\1/p' "$out/dense/config.toml")
data=(--data.tokenizer "$out/dense/tokenizer.json" --data.eos_token "$eos")
[ -e "$out/shards/manifest.json" ] ||
    tercet data prepare --data.source text --data.path "$train" "${data[@]}" --out "$out/shards"
data+=(--data.source shards --data.path "$out/shards")
for kind in dense own; do
    tercet train --config "$out/$kind/config.toml" "${data[@]}" "${recipe[@]}" --train.steps "$steps" --resume auto \
        --run.dir "$out/runs/$kind" ${TRAIN_FLAGS:-}
    tercet eval perplexity "$out/runs/$kind" --data "$held" --seq_len "$seq_len" | tee "$results/loss-$kind-trained.txt"
done
for length in $lengths; do
    for kind in dense own; do
        name=$kind-$length
        [ -d "$out/$name" ] ||
            tercet import hf "$model" "$out/$name" --attention "${attention[$kind]}" --extend "$length" --no_check
        tercet train --config "$out/$name/config.toml" "${data[@]}" "${recipe[@]}" --train.steps "$extend_steps" \
            --data.retrieval 0.2 --resume auto --run.dir "$out/runs/$name" ${TRAIN_FLAGS:-}
        [ -d "$out/hf-$name" ] || tercet export hf "$out/runs/$name" "$out/hf-$name" --format llama
        "$python" scripts/needles.py "$out/hf-$name" --lengths $((length / 2)),$((length - 200)) \
            --questions "$questions" | tee "$results/needles-$name.txt"
    done
done
