"""Smart Turn: a turn detector, which runs in a lane. It judges during a pause whether the turn is complete."""

from antiphon.adapters.spec import Spec

SPEC = Spec(role="turn", model="antiphon.adapters.smart_turn.turn_detector:SmartTurn", runs_on="lane", extra="")
