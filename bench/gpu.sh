#!/bin/sh
# Measures antiphon on one GPU, from a checkout: bench/gpu.sh --help. What it needs: bench/gpu-requirements.txt.
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root/src:$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m bench.gpu "$@"
