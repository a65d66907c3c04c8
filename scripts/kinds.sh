# What scripts/evidence.sh and scripts/retrieval.sh share: the kinds of models that they compare, and keeping results.

flags_of_kind() { # kind, sequence length -> preset and flags
    local compressed="m7c --model.selector compressed" one_set="--model.shared_kv true"
    case $1 in
    learned) echo m7c ;;
    compressed) echo "$compressed" ;;
    two-branch) echo m7c-two-branch ;;
    two-branch-shared) echo "m7c-two-branch $one_set" ;;
    one-branch) echo "m7c --model.branches selected $one_set" ;;
    block-sparse) echo m7c-block-sparse ;;
    all)
        if [ "$2" -gt 16384 ]; then
            refuse "$1 at length $2: the kernels read at most 256 blocks, 16384 tokens"
        else
            echo "$compressed" --model.nsa.select_count $(($2 / 64))
        fi
        ;;
    random) echo m7c --model.selector random ;;
    dense) echo m7c-dense ;;
    dense-matched) echo m7c-dense --model.ffn_dim 2184 ;; # as many parameters as compressed and two-branch
    *) refuse "kind $1 is unknown" ;;
    esac
}

refuse() {
    echo "$(basename "$0" .sh): $1" >&2
    return 2
}

wait_for() { # process ids: fail if one of them did
    local failed=0 job
    for job in "$@"; do wait "$job" || failed=$?; done
    return $failed
}

keep_run() { # run folder, prefix of the copies: copy its configuration and losses
    cp "$1/config.toml" "$2-config.toml"
    cp "$1/val.csv" "$2-validation.csv"
}

without_folders() { # configuration of a run, folder of the runs, files: rewrite the paths of this machine in them
    local corpus
    corpus=$(sed -n 's/^path = \["\(.*\)"\].*/\1/p' "$1")
    sed -i "s#$(realpath "$2")#runs#g; s#$2#runs#g; s#$corpus#corpus/$(basename "$corpus")#g" "${@:3}"
}
