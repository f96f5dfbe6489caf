"""The package's extras (pyproject.toml): checks whether they are installed, and names the command that installs one."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType

from antiphon.errors import SettingsError

# The packages that the code of each extra imports. The base package, which transcribes, needs none of them.
EXTRAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "speech": ("hibari", "onnx", "py3langid"),
        "talk": ("torch", "transformers", "accelerate", "safetensors", "llguidance", "jinja2", "gguf"),
        "video": ("rapidocr",),
        "webrtc": ("aiortc",),
        "devices": ("sounddevice",),
        "wyoming": ("zeroconf",),
        "mcp": ("mcp",),
        "sip": ("pylibsrtp",),
        "tls": ("cryptography", "ifaddr"),
    }
)


def missing_packages(extra: str) -> tuple[str, ...]:
    """Return the packages of an extra that are not installed; () for "", the base. Raises KeyError."""
    return tuple(name for name in EXTRAS[extra] if not _is_installed(name)) if extra else ()


def require_extra(extra: str, what: str) -> None:
    """Check that an extra is installed. `what` names the feature that needs it. Raises SettingsError if it is not."""
    if missing := missing_packages(extra):
        raise SettingsError(f"{what} needs {missing[0]}, which is not installed: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra from a clone, since no package is published yet."""
    return f"pip install '.[{extra}]'"


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
