"""stub"""
from typing import Any
def measure(times: int, log: Any) -> dict[str, Any]:
    return {}
