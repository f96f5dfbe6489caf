"""SIP transactions over a network that loses, doubles and delays messages, in virtual time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count

import pytest

from antiphon.protocols.telephony.sip.dialog import Dialog, new_tag, out_of_dialog
from antiphon.protocols.telephony.sip.messages import SipRequest, SipResponse, answer, parse
from antiphon.protocols.telephony.sip.transactions import GIVE_UP_S, ServerTransaction, Transactions


class Timer:
    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Clock:
    """Time that passes only when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Timer, Callable[[], None]]] = []
        self._number = count()

    def later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer()
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._number), timer, call))
        return timer

    def run(self, for_s: float) -> None:
        until_s = self.now_s + for_s
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, timer, call = heapq.heappop(self._due)
            if not timer.is_cancelled:
                call()
        self.now_s = until_s


class Side:
    """One side of a network: a peer for the other one. `loses` decides about each message."""

    protocol, is_reliable, is_closed, host, port = "UDP", False, False, "192.0.2.1", 5060

    def __init__(
        self, clock: Clock, loses: Callable[[], bool] = lambda: False, doubles: Callable[[], bool] = lambda: False
    ) -> None:
        self.clock, self.loses, self.doubles = clock, loses, doubles
        self.layer = Transactions(clock.later)
        self.other: Side
        self.sent: list[SipRequest | SipResponse] = []
        self.begun: list[ServerTransaction] = []
        self.on_request: Callable[[ServerTransaction], None] = self.begun.append

    def send(self, data: bytes) -> None:
        """Send to the other side."""
        self.sent.append(parse(data))
        for _ in range(2 if self.doubles() else 1):
            if not self.loses():
                self.clock.later(0.05, lambda: self.other.arrive(data))

    def arrive(self, data: bytes) -> None:
        message = parse(data)
        if isinstance(message, SipResponse):
            self.layer.take_response(message)
        elif transaction := self.layer.take(message, self):
            self.on_request(transaction)

    def count(self, what: str | int) -> int:
        return sum(m.method == what if isinstance(m, SipRequest) else m.status == what for m in self.sent)


def network(seed: int = 0, loss: float = 0.0, double: float = 0.0) -> tuple[Clock, Side, Side]:
    clock, draw = Clock(), random.Random(seed)
    one, two = (Side(clock, lambda: draw.random() < loss, lambda: draw.random() < double) for _ in range(2))
    one.other, two.other = two, one
    return clock, one, two


def request_of(side: Side, method: str) -> SipRequest:
    return out_of_dialog(
        method,
        "sip:bob@192.0.2.1",
        own=f"<sip:alice@192.0.2.2>;tag={new_tag()}",
        other="<sip:bob@192.0.2.1>",
        call_id=new_tag(),
        number=1,
        contact="<sip:alice@192.0.2.2:5060>",
        peer=side,
    )


def test_a_request_is_sent_again_until_it_is_answered_and_is_handled_once() -> None:
    clock, one, two = network()
    two.on_request = lambda t: (two.begun.append(t), clock.later(1.0, lambda: t.respond(answer(t.request, 200))))[0]
    got: list[SipResponse | None] = []
    one.layer.send(request_of(one, "OPTIONS"), one, got.append)
    clock.run(60)
    assert [r and r.status for r in got] == [200]
    # At 0 and 0.5 s; the answer came at 1.1 s.
    assert (one.count("OPTIONS"), len(two.begun)) == (2, 1)


def test_a_peer_that_never_answers_is_given_up() -> None:
    for method in ("INVITE", "BYE"):
        clock, one, two = network(loss=1.0)
        got: list[SipResponse | None] = []
        one.layer.send(request_of(one, method), one, got.append)
        clock.run(GIVE_UP_S - 1)
        assert got == []
        clock.run(2)
        assert got == [None]
        assert one.count(method) > 5
        assert two.begun == []


def test_a_refusal_is_acknowledged_and_repeated_until_then() -> None:
    clock, one, two = network()
    lost = iter([True, False])

    def loses() -> bool:
        """Lose the first ACK."""
        last = one.sent[-1]
        return isinstance(last, SipRequest) and last.method == "ACK" and next(lost)

    one.loses = loses
    acks: list[SipRequest] = []

    def refuse(transaction: ServerTransaction) -> None:
        transaction.acknowledged = acks.append
        transaction.respond(answer(transaction.request, 486, tag="b"))
        transaction.respond(answer(transaction.request, 200, tag="b"))

    two.on_request = refuse
    got: list[SipResponse | None] = []
    one.layer.send(request_of(one, "INVITE"), one, got.append)
    clock.run(60)
    assert [r and r.status for r in got] == [486]
    assert (two.count(486), two.count(200), one.count("ACK"), len(acks)) == (2, 0, 2, 1)


def test_an_answer_without_an_ack_is_repeated_and_then_given_up() -> None:
    clock, one, two = network()
    given_up: list[float] = []

    def take(transaction: ServerTransaction) -> None:
        transaction.unacknowledged = lambda: given_up.append(clock.now_s)
        transaction.respond(answer(transaction.request, 200, tag="b", headers=[("contact", "<sip:b@192.0.2.1>")]))

    two.on_request = take
    got: list[SipResponse | None] = []
    one.layer.send(request_of(one, "INVITE"), one, got.append)
    clock.run(60)
    # Each repetition asks for another ACK.
    assert [r and r.status for r in got] == [200] * two.count(200)
    assert two.count(200) > 5
    assert given_up == [pytest.approx(GIVE_UP_S + 0.05)]


def test_a_cancel_ends_an_invite_that_is_not_answered_yet() -> None:
    clock, one, two = network()

    def ring(transaction: ServerTransaction) -> None:
        transaction.cancelled = lambda: transaction.respond(answer(transaction.request, 487, tag="b"))
        transaction.respond(answer(transaction.request, 180, tag="b"))

    two.on_request = ring
    got: list[SipResponse | None] = []
    sent = one.layer.send(request_of(one, "INVITE"), one, got.append)
    clock.run(2)
    sent.cancel()
    clock.run(5)
    assert [r and r.status for r in got] == [180, 487]
    assert one.count("ACK") == 1
    # Nothing is left to cancel.
    stray = request_of(one, "CANCEL")
    one.layer.send(stray, one, got.append)
    clock.run(1)
    assert got[-1]
    assert got[-1].status == 481


@pytest.mark.parametrize("seed", range(30))
def test_calls_are_made_and_ended_over_a_bad_network(seed: int) -> None:
    """A third of all messages are lost, and a fifth come twice."""
    clock, one, two = network(seed, loss=0.33, double=0.2)
    acks, byes, dialogs = list[SipRequest](), list[ServerTransaction](), list[Dialog]()

    def take(transaction: ServerTransaction) -> None:
        request = transaction.request
        if request.method == "BYE":
            byes.append(transaction)
            transaction.respond(answer(request, 200))
        else:
            transaction.acknowledged = acks.append
            transaction.respond(answer(request, 200, tag="b", headers=[("contact", "<sip:b@192.0.2.1>")]))

    two.on_request = take
    invite = request_of(one, "INVITE")

    def answered(response: SipResponse | None) -> None:
        assert response
        if not dialogs:
            dialogs.append(Dialog.of_answer(invite, response, one, "<sip:alice@192.0.2.2:5060>"))
        one.send(dialogs[0].request("ACK", number=1).encode())

    one.layer.send(invite, one, answered)
    clock.run(GIVE_UP_S + 1)
    assert len(acks) == 1
    ended: list[SipResponse | None] = []
    one.layer.send(dialogs[0].request("BYE"), one, ended.append)
    clock.run(GIVE_UP_S + 1)
    assert [r and r.status for r in ended] == [200]
    assert [t.request.cseq for t in byes] == [(2, "BYE")]


def test_requests_of_a_dialog_pass_its_proxies_and_come_in_order() -> None:
    _, one, two = network()
    invite = request_of(one, "INVITE")
    invite.add("record-route", "<sip:p1.example.com;lr>, <sip:p2.example.com;lr>")
    dialog = Dialog.of_invite(invite, "b", two, "<sip:b@192.0.2.1:5060>")
    bye = dialog.request("BYE")
    assert bye.uri == "sip:alice@192.0.2.2:5060"
    assert bye.all("route") == ["<sip:p1.example.com;lr>", "<sip:p2.example.com;lr>"]
    assert (bye.from_tag, bye.to_tag) == ("b", invite.from_tag)
    assert dialog.key == (invite.call_id, "b", invite.from_tag)
    for number, admitted in ((1, False), (2, True), (2, False), (5, True), (4, False)):
        invite.set("cseq", f"{number} INFO")
        assert dialog.admits(invite) is admitted
    response = answer(invite, 200, tag="b", headers=[("contact", "<sip:b@192.0.2.9>")])
    ours = Dialog.of_answer(invite, response, one, "<sip:a@192.0.2.2:5060>")
    assert ours.request("BYE").all("route") == ["<sip:p2.example.com;lr>", "<sip:p1.example.com;lr>"]
