"""The link over gloo, with real processes that die, hang and come back; and its stand-in for tests."""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import link_peer
import pytest
from paceline.actors.device import Device
from paceline.actors.link import (
    _BEAT,
    _DATA,
    _HEADER,
    _MAGIC,
    LinkDown,
    LinkEvent,
    LinkSettings,
    LinkUp,
    Received,
    Side,
    StoreAddress,
    TorchLink,
    _Life,
    host_store,
    join_store,
)
from paceline.actors.memory_link import Chaos, memory_link

FAST = LinkSettings(heartbeat=0.1, deadline=1.0)
# What a loaded machine may add to any of the times that are promised.
SLACK = 1.0
CPU = Device("cpu")
# A server that has imported torch already forks the peers: they are there in milliseconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["paceline.actors.link"])
IN_FRAME = FAST.frame_bytes - _HEADER.size


class End:
    """One end of a link in this process, with what it delivered."""

    def __init__(
        self, side: Side, store: Any, name: str = "one", settings: LinkSettings = FAST, meeting: str = ""
    ) -> None:
        self.events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self.link = TorchLink(name, side, store, CPU, self.events.put, settings, meeting)

    def next(self, kind: type, timeout: float = 60.0) -> Any:
        event = self.events.get(timeout=timeout)
        assert isinstance(event, kind), event
        return event

    def received(self) -> bytes:
        return self.next(Received).data


class Peer:
    """The other end, in a process of its own."""

    def __init__(self, side: Side, port: int) -> None:
        self.process = FORKS.Process(target=link_peer.serve, args=(side, port, FAST), daemon=True)
        self.process.start()

    def signal(self, number: int) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)
        deadline = time.monotonic() + 10.0
        # On a busy machine it goes on for a moment.
        while number == signal.SIGSTOP and "State:\tT" not in Path(f"/proc/{self.process.pid}/status").read_text():
            assert time.monotonic() < deadline, "the peer does not stop"
            time.sleep(0.001)

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)


class Bench:
    """Starts ends and peers, and ends them all."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.store, self.port = host_store("127.0.0.1")

    def end(self, side: Side, **options: Any) -> End:
        end = End(side, self.store, **options)
        self._stack.callback(end.link.close)
        return end

    def pair(self, name: str = "one", settings: LinkSettings = FAST) -> tuple[End, End]:
        """Both ends in this process, up."""
        ends = tuple(self.end(side, name=name, settings=settings) for side in ("verifier", "drafter"))
        assert len({end.next(LinkUp).generation for end in ends}) == 1
        return ends

    def peer(self) -> Peer:
        peer = Peer("drafter", self.port)
        self._stack.callback(peer.end)
        return peer

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    before = link_threads()
    bench = Bench()
    yield bench
    bench.close()
    assert link_threads() == before


def link_threads() -> int:
    return sum(thread.name.startswith("link-") for thread in threading.enumerate())


def timed(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def await_echo(end: End) -> None:
    """Wait until the peer is up too."""
    end.next(LinkUp)
    assert end.link.send(b"there?")
    assert end.received() == b"there?"


def test_messages_of_all_sizes_arrive_whole_and_in_order(bench):
    sizes = [0, 1, IN_FRAME - 1, IN_FRAME, IN_FRAME + 1, FAST.frame_bytes, 16 * 1024, 2**20, FAST.max_message, 0, 1]
    messages = [random.Random(size).randbytes(size) for size in sizes]
    for source, target in (ends := bench.pair(), ends[::-1]):
        for message in messages:
            assert source.link.send(message)
        assert [target.received() for _ in messages] == messages


def test_a_message_over_the_limit_is_an_error(bench):
    verifier, _ = bench.pair(settings=replace(FAST, max_message=2000))
    with pytest.raises(ValueError, match="2001 bytes is over max_message"):
        verifier.link.send(bytes(2001))


def test_both_directions_at_once_under_load(bench):
    count, ends, pause = 2000, bench.pair(), threading.Event()

    def message(which: int, number: int) -> bytes:
        return struct.pack("<II", which, number) * (1, 50, 1000)[number % 3]

    def send(which: int) -> None:
        for number in range(count):
            while not ends[which].link.send(message(which, number)):
                pause.wait(0.001)

    def receive(which: int) -> None:
        for number in range(count):
            assert ends[1 - which].received() == message(which, number)

    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(act, which) for act in (send, receive) for which in (0, 1)]
        for part in work:
            part.result(60)
    assert ends[0].events.empty()
    assert ends[1].events.empty()


def test_a_killed_peer_is_noticed_and_a_new_one_welcome(bench):
    verifier = bench.end("verifier")
    for generation in (1, 2):
        peer = bench.peer()
        assert verifier.next(LinkUp).generation >= generation
        assert verifier.link.send(b"hello")
        assert verifier.received() == b"hello"
        peer.signal(signal.SIGKILL)
        assert timed(lambda: verifier.next(LinkDown)) < SLACK
        assert not verifier.link.send(b"anybody?")


def test_a_stopped_peer_is_lost_and_comes_back_in_a_new_generation(bench):
    verifier, peer = bench.end("verifier"), bench.peer()
    await_echo(verifier)
    peer.signal(signal.SIGSTOP)
    assert verifier.link.send(b"too late")
    silence = timed(lambda: verifier.next(LinkDown))
    assert 0.5 * FAST.deadline < silence < FAST.deadline + SLACK
    assert not verifier.link.send(b"anybody?")
    peer.signal(signal.SIGCONT)
    assert verifier.next(LinkUp).generation > 1
    assert verifier.link.send(b"history")
    answer = verifier.next(Received)
    assert answer.generation > 1
    # What was sent into the silence was delivered in the old generation, if at all.
    history = [line.split() for line in answer.data.decode().splitlines()]
    generations = [int(generation) for _, generation in history]
    assert generations == sorted(generations)
    assert history[0] == ["LinkUp", "1"]
    assert ["LinkDown", "1"] in history
    assert [what for what, generation in history if int(generation) == answer.generation] == ["LinkUp", "Received"]


def test_a_hung_peer_fills_the_queue_but_blocks_neither_send_nor_close(bench):
    # Silence alone must not end this link before the queue is full.
    verifier = bench.end("verifier", settings=replace(FAST, deadline=30.0, queue_messages=64))
    peer = bench.peer()
    await_echo(verifier)
    peer.signal(signal.SIGSTOP)
    slowest, sent = 0.0, 0
    while True:
        start = time.monotonic()
        accepted = verifier.link.send(bytes(2**20))
        slowest = max(slowest, time.monotonic() - start)
        if not accepted:
            break
        sent += 1
    assert 0 < sent <= 64
    assert slowest < SLACK
    assert timed(verifier.link.close) < SLACK
    assert verifier.next(LinkDown).reason == "closed"


def test_bytes_on_the_way_are_limited_too(bench):
    settings = replace(FAST, deadline=30.0, max_message=2**20, queue_bytes=5 * 2**20)
    verifier, peer = bench.end("verifier", settings=settings), bench.peer()
    await_echo(verifier)
    peer.signal(signal.SIGSTOP)
    assert [verifier.link.send(bytes(2**20)) for _ in range(7)].count(True) == 5


def test_a_peer_that_never_comes(bench):
    verifier, drafter = bench.end("verifier"), bench.end("drafter", name="other")
    for end in (verifier, drafter):
        with pytest.raises(queue.Empty):
            end.events.get(timeout=0.3)
        assert not end.link.send(b"x")
        assert timed(end.link.close) < SLACK


def test_many_reconnections_leave_nothing_behind(bench):
    verifier = bench.end("verifier")
    usage = []
    for generation in range(1, 13):
        drafter = bench.end("drafter")
        up = verifier.next(LinkUp)
        assert drafter.next(LinkUp) == up
        assert up.generation >= generation
        assert drafter.link.send(b"hello")
        assert verifier.received() == b"hello"
        usage.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
        drafter.link.close()
        assert drafter.next(LinkDown).reason == "closed"
        verifier.next(LinkDown)
    verifier.link.close()
    assert all(now <= before for now, before in zip(usage[-1], usage[1], strict=True)), usage
    assert sorted(bench.store.list_keys()) == ["paceline/link/one/generation", "paceline/link/one/hello"]


def test_losing_one_link_does_not_touch_another(bench):
    first, second = bench.pair("first"), bench.pair("second")
    first[1].link.close()
    first[0].next(LinkDown)
    for source, target in (second, second[::-1]):
        assert source.link.send(b"still here")
        assert target.received() == b"still here"
    assert second[0].events.empty()
    assert second[1].events.empty()


def test_each_side_may_have_a_name_of_its_own_for_the_other(bench):
    """So one drafter can tell its verifiers apart, each of which hosts a store; it need not hold on to any of these."""
    verifier = bench.end("verifier", name="drafter-0")
    bench.store, store = StoreAddress("127.0.0.1", bench.port), bench.store
    drafter = bench.end("drafter", name="verifier-7", meeting="drafter-0")
    assert (verifier.next(LinkUp).name, drafter.next(LinkUp).name) == ("drafter-0", "verifier-7")
    assert drafter.link.send(b"hello")
    assert verifier.received() == b"hello"
    del store


def test_a_delay_holds_up_every_message_and_keeps_their_order(bench):
    delay = 0.3
    verifier, drafter = bench.pair(settings=replace(FAST, delay=delay))
    sent: list[float] = []
    for number in range(40):
        sent.append(time.monotonic())
        assert drafter.link.send(bytes([number]))
    arrived = [verifier.next(Received) for _ in sent]
    assert [message.data for message in arrived] == [bytes([number]) for number in range(len(sent))]
    late = [message.at - at for message, at in zip(arrived, sent, strict=True)]
    # One after another they would take many times as long.
    assert delay <= min(late) <= max(late) < delay + SLACK
    # What is still on its way at the end is not lost, and nobody waits for it.
    assert timed(verifier.link.close) < delay + SLACK
    assert verifier.events.get_nowait().reason == "closed"


def test_a_message_says_when_it_was_delivered(bench):
    verifier, drafter = bench.pair()
    before = time.monotonic()
    assert drafter.link.send(b"now")
    assert before <= verifier.next(Received).at <= time.monotonic()


def test_an_idle_link_sleeps(bench):
    bench.pair()
    never = threading.Event()
    start, cpu = time.monotonic(), time.process_time()
    never.wait(2.0)
    share = (time.process_time() - cpu) / (time.monotonic() - start)
    # Both ends, at five times the usual heartbeat; a thread that polls takes 1.
    assert share < 0.1


def test_the_store_dies_with_the_verifier_and_comes_back():
    with ExitStack() as stack:
        port = host_store("127.0.0.1")[1]  # free again at once, since nothing keeps the store
        peer = Peer("verifier", port)
        stack.callback(peer.end)
        drafter = End("drafter", join_store("127.0.0.1", port, 60))
        stack.callback(drafter.link.close)
        await_echo(drafter)
        peer.signal(signal.SIGKILL)
        assert timed(lambda: drafter.next(LinkDown)) < SLACK
        cpu = time.process_time()
        peer = Peer("verifier", port)
        stack.callback(peer.end)
        await_echo(drafter)
        assert time.process_time() - cpu < 0.5
        peer.signal(signal.SIGKILL)
        drafter.next(LinkDown)
        assert timed(drafter.link.close) < SLACK


def test_a_verifier_that_hangs_with_its_store_and_goes_on():
    with ExitStack() as stack:
        port = host_store("127.0.0.1")[1]
        peer = Peer("verifier", port)
        stack.callback(peer.end)
        drafter = End("drafter", join_store("127.0.0.1", port, 60))
        stack.callback(drafter.link.close)
        await_echo(drafter)
        peer.signal(signal.SIGSTOP)
        assert timed(lambda: drafter.next(LinkDown)) < FAST.deadline + SLACK
        peer.signal(signal.SIGCONT)
        assert drafter.next(LinkUp).generation > 1
        peer.signal(signal.SIGSTOP)
        drafter.next(LinkDown)
        assert timed(drafter.link.close) < FAST.connect_timeout + SLACK
        peer.signal(signal.SIGKILL)
        for thread in drafter.link._threads:
            thread.join(10)
            assert not thread.is_alive()


def test_joining_a_store_that_is_not_there_ends():
    store, port = host_store("127.0.0.1")
    del store
    with pytest.raises(TimeoutError, match=f"no store answers at 127.0.0.1:{port}"):
        join_store("127.0.0.1", port, 0.2)


def test_a_deliver_function_that_fails_does_not_end_the_link(bench, caplog):
    verifier, drafter = bench.pair()
    good = verifier.link._deliver

    def fail(event: LinkEvent) -> None:
        verifier.link._deliver = good
        raise KeyError("a bug in the loop")

    verifier.link._deliver = fail
    assert drafter.link.send(b"one")
    assert drafter.link.send(b"two")
    assert verifier.received() == b"two"
    assert "could not be delivered" in caplog.text


def test_an_interpreter_that_forgets_to_close_ends_cleanly(bench):
    program = (
        "import sys, queue; sys.path.insert(0, sys.argv[1]); import link_peer as p;"
        "q = queue.Queue(); store = p.join_store('127.0.0.1', int(sys.argv[2]), 10);"
        "link = p.TorchLink('one', 'drafter', store, p.Device('cpu'), q.put, p.LinkSettings()); q.get(timeout=20)"
    )
    verifier = bench.end("verifier")
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(bench.port)]
    assert subprocess.run(command, timeout=60).returncode == 0
    verifier.next(LinkUp)
    verifier.next(LinkDown)


class OneFrame:
    """A wire on which one frame comes in."""

    def __init__(self, frame: bytes) -> None:
        self.waiting = [frame]

    def frame(self, timeout: float) -> bytes:
        return self.waiting.pop()

    def body(self, size: int, timeout: float) -> bytes:
        return bytes(size)

    def send(self, data: bytearray, *, body: bool) -> object:
        return data


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ((b"HTTP", _DATA, 7, 1, 0, 0), "came where 1 was due"),
        ((_MAGIC, _DATA, 6, 1, 0, 0), "generation 6"),
        ((_MAGIC, _DATA, 7, 3, 0, 0), "frame 3"),
        ((_MAGIC, _DATA, 7, 1, 0, 2**63), "max_message"),
        ((_MAGIC, _BEAT, 7, 1, 1, 0), "claims 1 frames of 0"),
    ],
)
def test_frames_of_no_peer_of_ours_break_the_link(header, complaint):
    life = _Life(OneFrame(_HEADER.pack(*header).ljust(FAST.frame_bytes, b"\0")), 7, FAST)
    with pytest.raises(RuntimeError, match=complaint):
        life.note(0, life.receive()[2])


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"frame_bytes": 16}, "frame_bytes"),
        ({"heartbeat": 3.0}, "heartbeat"),
        ({"queue_bytes": 10}, "queue_bytes"),
        ({"delay": -0.1}, "delay"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        LinkSettings(**fields)


def test_names_and_frames_that_cannot_work_are_refused(bench):
    with pytest.raises(ValueError, match="name"):
        bench.end("verifier", name="a/b")
    with pytest.raises(ValueError, match="frames"):
        bench.end("verifier", settings=replace(FAST, frames="device"))


def test_memory_link_keeps_the_contract():
    heard_a: list[LinkEvent] = []
    heard_b: list[LinkEvent] = []
    a, b = memory_link("m", heard_a.append, heard_b.append, limit=3)
    assert [a.send(bytes([i])) for i in range(4)] == [True, True, True, False]
    assert b.pump(2) == 3
    assert heard_b == [LinkUp("m", 1), Received("m", 1, b"\0"), Received("m", 1, b"\1")]
    a.down("cut")
    assert not a.send(b"x")
    assert not b.send(b"x")
    a.up()
    assert a.send(b"again")
    b.pump()
    assert heard_b[3:] == [LinkDown("m", 1, "cut"), LinkUp("m", 2), Received("m", 2, b"again")]
    a.pump()
    assert heard_a == [LinkUp("m", 1), LinkDown("m", 1, "cut"), LinkUp("m", 2)]


def test_memory_link_faults_come_from_the_seed():
    def run(seed: int) -> list[bytes]:
        heard: list[LinkEvent] = []
        a, b = memory_link("m", print, heard.append, Chaos(random.Random(seed), 0.2, 0.2, 0.2), limit=1000)
        for number in range(200):
            a.send(struct.pack("<I", number))
        a.shuffle(random.Random(seed))
        b.pump()
        return [event.data for event in heard if isinstance(event, Received)]

    sent = [struct.pack("<I", number) for number in range(200)]
    heard = run(1)
    assert heard == run(1) != run(2)
    lost, repeated = set(sent) - set(heard), [data for data in set(heard) if heard.count(data) > 1]
    assert lost
    assert repeated
    assert set(heard) - set(sent)
    assert [data for data in heard if data in sent] != sorted(data for data in heard if data in sent)
