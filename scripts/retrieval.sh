#!/usr/bin/env bash
# Train and evaluate the runs of docs/results/retrieval.md and docs/results/evidence.md.
#
#     bash scripts/retrieval.sh train KIND CORPUS RUNS [flags of tercet train]
#     bash scripts/retrieval.sh evals KIND RUNS
#     bash scripts/retrieval.sh keep KIND RUNS                           # copy files for the tables of retrieval.md
#     bash scripts/retrieval.sh keep KIND RUNS SEED [NAME]               # with STOP: for those of evidence.md
#     bash scripts/retrieval.sh small KIND CORPUS RUNS SEED [flags]      # a model of 13M parameters, trained with Muon and evaluated
#     bash scripts/retrieval.sh keep small RUNS                          # collect those, for a table of retrieval.md
#
# KIND: learned; two-branch (learned without the compressed branch), two-branch-shared (and one set of keys and values);
# one-branch (block-sparse with gates); block-sparse (one branch without gates, learned selectors); compressed (scores of
# compressed keys choose the blocks); dense, or dense-matched (a wider FFN: as many parameters as two-branch). Controls:
# all (NSA reads every block, up to 8,192 tokens) and random (blocks). A suffix -plain leaves the exercises out.
# CORPUS: shards from scripts/linux_corpus.sh. STOP: a step after which `train` is interrupted, such as 1700, the end of
# the first stage; its checkpoint stays, and the learning rate is that of the whole run. With STOP, `evals` evaluates that
# checkpoint up to 8,192 tokens. LR: learning rate (1e-3; of `small` 3e-3, Muon's).
# On an H200 `learned` trains for eight minutes; its evaluations take four.
set -euo pipefail
usage() { sed -n '2,18p' "$0" >&2; exit 2; }
[ $# -ge 3 ] || usage
phase=$1 kind=$2
python=${PYTHON:-python3}
# shellcheck source=scripts/kinds.sh
. "$(dirname "$0")/kinds.sh"

flags_of() { # kind -> preset and flags
    flags_of_kind "${1%-plain}" 8192 || usage
    [ "$1" != "${1%-plain}" ] || echo "--data.retrieval $SHARE"
}

run() { # folder, flags: train, or continue
    local folder=$1 words
    words=$(flags_of "$kind")
    shift
    # shellcheck disable=SC2086
    "$python" -m tercet train --preset $words --run.name "$(basename "$folder")" --run.dir "$folder" \
        --data.source shards --data.path "$corpus" --data.tokenizer byte --data.shuffle_sequences 256 \
        --model.rope_theta 500000 --model.rope_max_wavelength 8192 --train.stages $STAGES --train.warmup_steps 100 \
        --train.weight_decay 0.1 --train.val_tokens 1048576 --checkpoint.keep 1 --health.memory_every 0 --resume auto "$@"
}

case $phase in
train)
    [ $# -ge 4 ] || usage
    corpus=$3 runs=$4 SHARE=0.3
    STAGES=${STAGES:-8192:1700 32768:300 65536:500}
    shift 4
    settings=(--train.lr "${LR:-1e-3}" --train.val_every 650 --checkpoint.every 1300)
    if [ -z "${STOP:-}" ]; then
        run "$runs/$kind" "${settings[@]}" "$@"
        exit
    fi
    run "$runs/$kind" "${settings[@]}" --checkpoint.keep 0 "$@" &
    reached=$runs/$kind/checkpoints/step-$(printf %08d "$STOP")
    while kill -0 $! 2>/dev/null && [ ! -e "$reached" ]; do sleep 0.5; done
    pkill -TERM -P $! || true
    wait $! || true
    [ -e "$reached" ]
    ;;
small)
    [ $# -ge 5 ] || usage
    corpus=$3 runs=$4 folder=$4/small-$kind-$5 SHARE=0.5
    STAGES=${STAGES:-8192:1000}
    run "$folder" --run.seed "$5" --model.dim 320 --model.layers 12 --model.heads 5 --model.kv_heads 1 \
        --model.ffn_dim 832 --train.optimizer muon --train.muon.lr "${LR:-3e-3}" --train.lr 1e-3 --train.val_every 200 \
        --train.sample_tokens 0 --checkpoint.every 0 --log.no_tensorboard "${@:6}"
    "$python" -m tercet eval ruler "$folder" --lengths 1024,2048,4096,8192 --tasks niah_single_2,niah_multikey_1 \
        --wording training --out "$folder.json"
    "$python" -m tercet eval perplexity "$folder" --seq-len 8192 --sequences 128 --batch 8 --dtype bfloat16 \
        > "$folder-perplexity.txt"
    ;;
evals)
    run=$3/$kind jobs=()
    if [ -n "${STOP:-}" ]; then
        run=$run/checkpoints/step-$(printf %08d "$STOP")
        "$python" -m tercet eval ruler "$run" --lengths 1024,8192 --tasks niah_single_2,niah_multikey_1,niah_multikey_2 \
            --questions 100 --wording training --out "$3/$kind-ruler.json" > "$3/$kind-ruler.txt" &
        jobs+=($!)
    fi
    "$python" -m tercet eval needle "$run" --style text --lengths 1024 2048 4096 8192 --trials 16 --dtype bfloat16 \
        --depths 0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1.0 > "$3/$kind-needle.txt" &
    jobs+=($!)
    "$python" -m tercet eval perplexity "$run" --seq-len 8192 --sequences 256 --batch 8 --dtype bfloat16 \
        > "$3/$kind-perplexity.txt" &
    jobs+=($!)
    wait_for "${jobs[@]}"
    [ -z "${STOP:-}" ] || exit 0
    jobs=()
    lengths=1024,2048,4096,8192,16384,32768,65536
    for wording in training held-out; do
        "$python" -m tercet eval ruler "$run" --lengths $lengths --tasks niah_single_2 --wording $wording \
            --out "$3/$kind-single-$wording.json" --plot "$3/$kind-single-$wording.svg" > "$3/$kind-single-$wording.txt" &
        jobs+=($!)
    done
    "$python" -m tercet eval ruler "$run" --lengths 1024,4096,8192 --questions 100 --wording training \
        --out "$3/$kind-tasks.json" > "$3/$kind-tasks.txt" &
    jobs+=($!)
    "$python" -m tercet eval context "$run" --lengths 8192 16384 32768 65536 > "$3/$kind-context.txt" &
    jobs+=($!)
    wait_for "${jobs[@]}"
    ;;
keep)
    [ $# -le 5 ] || usage
    results=$(dirname "$0")/../docs/results
    if [ "$kind" = small ]; then
        "$python" - "$3" > "$results/retrieval/small.csv" <<'END'
import csv, json, pathlib, sys
print("kind,seed,loss,far_loss,task,length,depth,right,questions")
for found in sorted(pathlib.Path(sys.argv[1]).glob("small-*.json")):
    run = found.with_suffix("")
    *_, last = csv.DictReader((run / "val.csv").open())
    perplexity = json.loads(pathlib.Path(f"{run}-perplexity.txt").read_text().splitlines()[-1])
    (far,) = (each["loss"] for each in perplexity["by_position"] if each["first"] == 4096)
    kind, seed = run.name.removeprefix("small-").rsplit("-", 1)
    for each in json.loads(found.read_text())["found"]:
        depth = "" if each["depth"] is None else f"{each['depth']:.2f}"  # all depths, or one
        place = each["task"], each["length"], depth
        print(kind, seed, f"{float(last['loss']):.5f}", f"{far:.5f}", *place, each["right"], each["questions"], sep=",")
END
        exit
    fi
    if [ $# -eq 3 ]; then
        to=$results/retrieval/$kind columns=1,2,4,7
        files=(needle.txt perplexity.txt context.txt single-training.json single-held-out.json tasks.json)
    else
        to=$results/evidence/${5:-$kind}-$4 columns=1,2
        files=(needle.txt perplexity.txt ruler.json)
    fi
    keep_run "$3/$kind" "$to"
    cut -d, -f$columns "$3/$kind/training.csv" > "$to-training.csv"
    for file in "${files[@]}"; do cp "$3/$kind-$file" "$to-$file"; done
    without_folders "$3/$kind/config.toml" "$3" "$to"-*
    ;;
*) usage ;;
esac
