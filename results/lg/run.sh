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

for seed in 0 1 2; do
    for run in mnist-lg mnist-fedavg mnist-local mnist-mtl; do
        go $run -s$seed --set run.seed=$seed
    done
done
go mnist-lg2 -s0
go mnist-lg-eden -s0
go mnist-fedavg400 -s0
go mnist-lg-fedsparse -s0 --set model.init="$out/mnist-fedavg400-s0/model.safetensors"
for run in cifar10-lg cifar10-fedavg cifar10-local cifar10-mtl; do
    go $run -s0
done
for kind in iid noniid; do
    for c in 0.0 0.1; do
        for method in fedavg lg; do
            go rotated-$kind-$method -c$c --new-device --set new_device.fraction=$c
        done
        for mu in 0.01 0.1 1.0; do
            go rotated-$kind-fedprox -c$c-mu$mu --new-device --set new_device.fraction=$c --set method.mu=$mu
        done
    done
    for seed in 0 1 2; do
        go adult-$kind-fedavg -s$seed --set run.seed=$seed
        go adult-$kind-lg -s$seed --set run.seed=$seed
        for weight in 0.03 0.1 0.3 1.0 3.0 10.0 30.0; do
            go adult-$kind-lg-adversary -w$weight-s$seed --set run.seed=$seed --set method.objective_weight=$weight
        done
    done
done
