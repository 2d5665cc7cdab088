#!/bin/sh
# The records of finished runs into this folder, and the pictures from them.
# usage: sh results/lg/collect.sh [runs/lg]
set -e
out=${1:-runs/lg}
here=$(dirname "$0")
for run in "$out"/*/summary.json; do
    folder=$(dirname "$run")
    name=$(basename "$folder")
    cp "$folder/metrics.jsonl" "$here/$name.jsonl"
    cp "$run" "$here/$name.summary.json"
done
picture() {  # picture FILE HOW FAMILY
    if ls "$here/$3"*.jsonl >/dev/null 2>&1; then
        python "$here/../plot.py" "$here" "$here/$1.svg" "$2" "$3"
    fi
}
picture mnist local mnist-
picture cifar10 local cifar10-
for kind in iid noniid; do
    picture fairness-$kind fairness adult-$kind-
    picture newcomer-$kind newcomer rotated-$kind-
done
