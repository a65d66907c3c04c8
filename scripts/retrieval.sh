#!/usr/bin/env bash
# Train and evaluate the models of docs/results/retrieval.md and, with STOP=1700, of docs/results/evidence.md.
#
#     bash scripts/retrieval.sh train KIND CORPUS RUNS [flags of tercet train]
#     bash scripts/retrieval.sh evals KIND RUNS
#
# KIND: nsa, two-branch or block-sparse (all with learned selectors), or dense. CORPUS: shards of
# scripts/linux_corpus.sh. STOP: the step after which the run ends; the learning rate is that of the whole run. On an
# H200 `nsa` trains for eight minutes; its evaluations take four.
set -euo pipefail
usage() { sed -n '2,9p' "$0" >&2; exit 2; }
[ $# -ge 3 ] || usage
tercet="${PYTHON:-python3} -m tercet"
case $2 in
nsa) preset=m7c ;;
two-branch | block-sparse | dense) preset=m7c-$2 ;;
*) usage ;;
esac

case $1 in
train)
    [ $# -ge 4 ] || usage
    $tercet train --preset $preset --run.name "$2" --run.dir "$4/$2" --resume auto \
        --data.source shards --data.path "$3" --data.tokenizer byte --data.shuffle_sequences 256 --data.retrieval 0.3 \
        --model.rope_theta 500000 --model.rope_max_wavelength 8192 --train.stages 8192:1700 32768:300 65536:500 \
        --train.lr 1e-3 --train.warmup_steps 100 --train.weight_decay 0.1 --train.val_tokens 1048576 \
        --train.val_every 650 --checkpoint.every 1300 --checkpoint.keep 0 "${@:5}" &
    if [ -n "${STOP:-}" ]; then # a stage's last step is saved
        reached=$4/$2/checkpoints/step-$(printf %08d "$STOP")
        while kill -0 $! 2>/dev/null && [ ! -e "$reached" ]; do sleep 0.5; done
        kill -TERM $! 2>/dev/null || true
        wait $! || [ -e "$reached" ]
    else
        wait $!
    fi
    ;;
evals)
    run=$3/$2 out=$3/$2 long=,16384,32768,65536
    [ -z "${STOP:-}" ] || { run=$run/checkpoints/step-$(printf %08d "$STOP") long=; }
    $tercet eval perplexity "$run" --seq-len 8192 --sequences 256 --batch 8 --dtype bfloat16 > "$out-perplexity.txt"
    for wording in training held-out; do
        $tercet eval ruler "$run" --lengths 1024,2048,4096,8192$long --tasks niah_single_2 --wording $wording \
            > "$out-single-$wording.txt"
    done
    $tercet eval ruler "$run" --lengths 1024,4096,8192 --questions 100 --wording training > "$out-tasks.txt"
    [ -n "${STOP:-}" ] || $tercet eval context "$run" --lengths 8192 16384 32768 65536 > "$out-context.txt"
    ;;
*) usage ;;
esac
