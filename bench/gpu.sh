#!/bin/sh
# Measures antiphon on one GPU, from a checkout: bench/gpu.sh --help. Requirements: bench/gpu-requirements.txt.
# Runs with $PYTHON, or else with the checkout's virtual environment if it exists, or else with python3.
root=$(cd "$(dirname "$0")/.." && pwd)
own="$root/.venv/bin/python"
[ -x "$own" ] || own=python3
export PYTHONPATH="$root/src:$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-$own}" -m bench.gpu "$@"
