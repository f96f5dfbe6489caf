"""How long `semantic_vad` waits for a turn that does not sound finished."""

from __future__ import annotations

# How long a semantic turn waits for more where what was said is not complete. Milliseconds.
EAGERNESS_MS = {"low": 8000, "auto": 4000, "medium": 4000, "high": 2000}
# And after what is.
COMPLETE_MS = 300
