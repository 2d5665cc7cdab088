#!/bin/sh
# All rows of the table, one after the other; run again, it goes on where it stopped.
#   LACONIC_DATA=<folder with cifar10/> sh results/codecs/run.sh <output folder>
set -eu
here=$(dirname "$0")
out=${1:-runs/codecs}
while read -r name codec; do
    laconic run "$here/cifar10.toml" --set run.name="$name" --set link.up="\"$codec\"" --out "$out" --resume
done <<'CODECS'
float32 float32
eden-1 eden:bits=1
eden-2 eden:bits=2
eden-4 eden:bits=4
drive drive
qsgd qsgd:levels=128
terngrad terngrad
signsgd signsgd
ef-signsgd ef(signsgd)
ef-topk ef(topk:fraction=0.01)
CODECS
