#!/bin/sh
# Usage: setup.sh PEER      (PEER: realtimestt | speech_to_speech | xllamacpp | piper | pocketsphinx)
# Creates .venv-PEER next to this script from PEER/requirements.txt. A second run
# does nothing unless that file has changed. PYTHON picks the interpreter
# (Python 3.11; default python3).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
peer=${1:?usage: setup.sh PEER}
req=$here/$peer/requirements.txt
venv=$here/.venv-$peer
[ -f "$req" ] || { echo "no such peer: $peer" >&2; exit 2; }

sum=$(sha256sum < "$req")
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.done" 2>/dev/null)" = "$sum" ]; then
    echo "$venv is up to date"
    exit 0
fi

rm -f "$venv/.done"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
# The list has all packages with their versions. --no-deps keeps the peer's
# metadata from adding torchaudio, PyAudio or CUDA libraries.
"$venv/bin/pip" install --quiet --no-deps -r "$req"
grep -q "^torch==" "$req" || { printf '%s\n' "$sum" > "$venv/.done"; echo "$venv is ready"; exit 0; }
"$venv/bin/python" -c 'import torch; print("torch", torch.__version__)' || {
    echo "torch does not load: a CPU build of torch is needed" \
         "(point pip at one with PIP_FIND_LINKS or PIP_INDEX_URL)" >&2
    exit 1
}
printf '%s\n' "$sum" > "$venv/.done"
echo "$venv is ready"
