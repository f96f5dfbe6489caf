#!/bin/sh
# Measures antiphon on one GPU, from a checkout: bench/gpu.sh --help. What it needs: bench/gpu-requirements.txt.
# It runs in $PYTHON, else in the checkout's own environment where there is one, else in python3.
root=$(cd "$(dirname "$0")/.." && pwd)
own="$root/.venv/bin/python"
[ -x "$own" ] || own=python3
export PYTHONPATH="$root/src:$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-$own}" -m bench.gpu "$@"
