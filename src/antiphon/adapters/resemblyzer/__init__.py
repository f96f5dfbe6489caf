"""Resemblyzer's voice encoder: a speaker encoder, which runs in a lane. It distinguishes voices."""

from antiphon.adapters.spec import Spec

SPEC = Spec(role="speaker", model="antiphon.adapters.resemblyzer.encoder:ResemblyzerEncoder", runs_on="lane")
