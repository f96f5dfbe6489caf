"""Resemblyzer's voice encoder: a speaker encoder in a lane, which tells voices apart."""

from antiphon.adapters.spec import Spec

SPEC = Spec(role="speaker", model="antiphon.adapters.resemblyzer.encoder:ResemblyzerEncoder", runs_on="lane")
