"""A conversation's microphone and loudspeaker."""

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
