"""Smart Turn: a turn detector in a lane, which judges whether a turn that pauses is complete."""

from antiphon.adapters.spec import Spec

SPEC = Spec(role="turn", model="antiphon.adapters.smart_turn.turn_detector:SmartTurn", runs_on="lane", extra="")
