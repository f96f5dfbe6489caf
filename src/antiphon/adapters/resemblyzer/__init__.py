"""Resemblyzer's voice encoder: a speaker encoder, which distinguishes voices and runs in a lane."""

from antiphon.adapters.spec import Spec

SPEC = Spec(role="speaker", model="antiphon.adapters.resemblyzer.encoder:ResemblyzerEncoder", runs_on="lane")
