#!/bin/sh
# LG-FedAvg's experiments, in the order of their importance; resumable: what is done is not done again.
# usage: sh results/lg/run.sh [runs/lg] [workers]
set -e
out=${1:-runs/lg}
workers=${2:-auto}
here=$(dirname "$0")

go() {  # go FILE SUFFIX [more words]: a run whose folder is FILE with SUFFIX
    file=$1 name=$1$2
    shift 2
    test -f "$out/$name/summary.json" && return 0
    laconic run "$here/$file.toml" --out "$out" --set run.name="$name" --workers "$workers" --resume "$@"
}

branch() {  # branch FROM ROUND FILE SUFFIX: FROM's rounds are FILE's up to ROUND, so that they are not made again
    test -d "$out/$3$4" || python "$here/branch.py" "$out/$1" "$2" "$here/$3.toml" "$out" "$3$4"
}

adult() {  # adult SEED: both splits, three methods, the curve over lambda against the paper's adversary
    for kind in iid noniid; do
        for method in fedavg lg; do
            go adult-$kind-$method -s$1 --set run.seed=$1
        done
        for weight in 0.03 0.3 1.0 3.0 10.0 30.0; do
            go adult-$kind-lg-adversary -w$weight-s$1 --set run.seed=$1 --set method.objective_weight=$weight
        done
    done
}

opponent() {  # opponent SEED LAMBDA…: the curve against a strong one
    seed=$1
    shift
    for weight in "$@"; do
        for kind in iid noniid; do
            go adult-$kind-lg-opponent -w$weight-s$seed --set run.seed=$seed --set method.objective_weight=$weight
        done
    done
}

mnist() {  # mnist SEED: the four methods, and LG with the two layers that the paper's cost is of
    go mnist-lg -s$1 --set run.seed=$1
    branch mnist-lg-s$1 400 mnist-lg2 -s$1
    go mnist-lg2 -s$1 --set run.seed=$1
    branch mnist-lg-s$1 400 mnist-fedavg -s$1
    go mnist-fedavg -s$1 --set run.seed=$1
    go mnist-local -s$1 --set run.seed=$1
    go mnist-mtl -s$1 --set run.seed=$1
}

rotated() {  # rotated KIND C METHOD [SUFFIX more words]
    what=rotated-$1-$3 suffix=-c$2$4 c=$2
    test $# -gt 3 && shift 4 || shift 3
    go "$what" "$suffix" --new-device --set new_device.fraction="$c" "$@"
}

adult 0
opponent 0 3.0 10.0
mnist 0
test -f "$out/mnist-lg-s0/round-400.safetensors" ||
    python "$here/branch.py" "$out/mnist-lg-s0" 400 "$out/mnist-lg-s0/round-400.safetensors"
go mnist-lg-fedsparse -s0 --set model.init="$out/mnist-lg-s0/round-400.safetensors"
for kind in iid noniid; do
    for method in lg fedavg; do
        rotated $kind 0.0 $method
    done
done
opponent 0 1.0 30.0 0.3
go mnist-lg-eden -s0
go cifar10-lg -s0
branch cifar10-lg-s0 600 cifar10-fedavg -s0
for run in cifar10-fedavg cifar10-local cifar10-mtl vqa-fedavg vqa-lg; do
    go $run -s0
done
for kind in iid noniid; do
    for method in lg fedavg; do
        rotated $kind 0.1 $method
    done
    rotated $kind 0.1 fedprox -mu0.1 --set method.mu=0.1
done
for seed in 1 2; do
    mnist $seed
    adult $seed
    opponent $seed 1.0 3.0 10.0
done
