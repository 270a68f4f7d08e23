"""The wire layout: every message comes back as it was sent, and no bytes whatever do harm."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.actors.messages import Close, GrowthMessage, Malformed, Open, Verdict, decode, encode
from paceline.actors.schedules import MAX_BUDGET, MAX_FANOUT, MAX_K, MAX_WIDTH, SCHEDULES, Plan
from paceline.actors.tree import NewNode
from paceline.actors.values import Constraints, Sampling

u32 = st.integers(0, 2**32 - 1)
tokens = st.lists(u32, max_size=50).map(tuple)
samplings = st.builds(
    Sampling, st.floats(0, 10), st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**64 - 1)
)
plans = st.builds(
    Plan,
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, MAX_K),
    st.integers(1, MAX_FANOUT),
    st.integers(1, MAX_WIDTH),
    st.integers(1, MAX_BUDGET),
    st.floats(0, 1, width=32),
    st.integers(0, MAX_K),
)
floats = st.floats(-100, 100)
constraints = st.builds(
    Constraints,
    st.lists(st.tuples(u32, floats), max_size=5).map(tuple),
    st.floats(0.01, 100),
    floats,
    floats,
    st.lists(st.lists(u32, min_size=1, max_size=4).map(tuple), max_size=4).map(tuple),
    u32,
    tokens,
    st.text(max_size=50),
)
opens = st.builds(Open, u32, u32, tokens, samplings, plans, st.just(0), constraints)
nodes = st.builds(NewNode, st.integers(1, 2**32 - 1), u32, u32, st.floats(-100, 0, width=32))
seconds = st.floats(0, 1000, width=32)
growths = st.builds(
    GrowthMessage,
    u32,
    u32,
    u32,
    u32,
    st.lists(nodes, max_size=20).map(tuple),
    st.booleans(),
    st.booleans(),
    seconds,
    seconds,
)
messages = st.one_of(
    opens, growths, st.builds(Verdict, u32, u32, u32, tokens, plans, st.booleans()), st.builds(Close, u32, u32)
)


@settings(deadline=None)
@given(messages)
def test_round_trip(message):
    assert decode(encode(message)) == message


@settings(max_examples=1000, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_malformed(data):
    try:
        decode(data)
    except Malformed:
        pass


@settings(max_examples=1000, deadline=None)
@given(messages, st.data())
def test_a_damaged_message_still_names_its_session_where_the_header_is_whole(message, data):
    good = encode(message)
    at = data.draw(st.integers(4, len(good) - 1))
    bad = data.draw(st.sampled_from([good[:at], good[:at] + b"\xff" + good[at + 1 :], good + b"\0"]))
    try:
        decode(bad)
    except Malformed as error:
        if len(bad) >= 16:
            assert (error.session, error.epoch) == struct.unpack_from("<II", bad, 4)


def test_positive_infinite_and_undefined_log_q_are_malformed():
    for logq in (0.5, float("nan"), float("-inf")):
        bad = encode(GrowthMessage(1, 2, 3, 0, (NewNode(1, 0, 5, logq),)))
        with pytest.raises(Malformed, match="log q"):
            decode(bad)


def test_a_plan_that_nobody_could_follow_is_malformed():
    for plan in (
        Plan("nosuch"),
        Plan("sync", k=MAX_K + 1),
        Plan("sync", k=0),
        Plan("saguaro", acceptance=float("nan")),
    ):
        with pytest.raises(Malformed, match="follow"):
            decode(encode(Verdict(1, 2, 3, (4,), plan)))


def test_times_that_no_clock_shows_are_malformed():
    for step, age in ((-1.0, 0.0), (0.0, float("nan")), (float("inf"), 0.0)):
        with pytest.raises(Malformed, match="seconds"):
            decode(encode(GrowthMessage(1, 2, 3, 0, step=step, age=age)))
