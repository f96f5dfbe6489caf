"""The microphone and loudspeaker of a conversation: devices or files."""

from antiphon.client.devices.playback import Playback
from antiphon.client.devices.sound import (
    INPUT_HZ,
    OUTPUT_HZ,
    HeardFile,
    check_sound,
    sound_devices,
    sound_files,
)

__all__ = ["INPUT_HZ", "OUTPUT_HZ", "HeardFile", "Playback", "check_sound", "sound_devices", "sound_files"]
