"""CAM++: a speaker encoder for many microphones and lines, which runs in a lane."""

from antiphon.adapters.spec import Spec

SPEC = Spec(role="speaker", model="antiphon.adapters.campplus.encoder:CamPlusPlusEncoder", runs_on="lane")
