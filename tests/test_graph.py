import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.graph import Columns, Edge, TraceGraph, columns
from counterpoint.schema import (
    KINDS,
    Act,
    Cause,
    ForkRef,
    Header,
    Item,
    Observe,
    Reward,
    Stop,
    Trace,
)
from counterpoint.spelling import Refused
from counterpoint.validate import validate


def make(kind, seq, agent, *causes, **fields):
    """An event whose causes are seqs or (seq, edge kind) or (seq, edge kind, basis)."""
    links = []
    for cause in causes:
        filled = cause if isinstance(cause, tuple) else (cause, "derives")
        links.append(Cause(**dict(zip(("seq", "kind", "basis"), filled, strict=False))))
    return KINDS[kind](trace_id="t", seq=seq, agent=agent, causes=tuple(links), **fields)


def trace_of(*events, fork=None):
    return Trace(Header(trace_id="t", counterpoint=1, fork=fork), tuple(events))


ORDER = "inferred:order"

TEAM = trace_of(
    make("observe", 0, "lead"),
    make("act", 1, "lead", 0),
    make("spawn", 2, "lead", (1, "authorizes"), child="x"),
    make("spawn", 3, "lead", (1, "authorizes"), child="y"),
    make("observe", 4, "x", (2, "spawns")),
    make("act", 5, "x", 4),
    make("observe", 6, "y", (3, "spawns")),
    make("act", 7, "y", 6),
    make("message", 8, "x", (5, "authorizes"), to=("lead",)),
    make("message", 9, "y", (7, "authorizes"), to=("lead",)),
    make("deliver", 10, "lead", (9, "delivers"), message=9),
    make("observe", 11, "lead", (1, "precedes"), (8, "consumes"), (10, "consumes")),
    make("act", 12, "lead", 11),
    make("tool_call", 13, "x", (5, "authorizes"), tool="t"),
    make("stop", 14, "lead", (12, "authorizes")),
)
"""A lead spawns x and y, both report, the lead reads both; x makes a call that nobody waits for."""


def test_ancestors_are_what_led_to_an_event():
    """Everything that led to the stop is its ancestor; the call that nobody waited for is not."""
    assert TraceGraph(TEAM).ancestors(14).tolist() == list(range(13))
    assert TraceGraph(TEAM).ancestors(8).tolist() == [0, 1, 2, 4, 5]
    assert TraceGraph(TEAM).ancestors(0).tolist() == []


def test_descendants_are_what_an_event_led_to():
    """Y's turn reaches the lead but never x's call."""
    assert TraceGraph(TEAM).descendants(7).tolist() == [9, 10, 11, 12, 14]
    assert TraceGraph(TEAM).descendants(14).tolist() == []


def test_branch_points_start_two_lines_of_work():
    """The act that spawned twice and x's act that sent and called are branch points, no others."""
    assert TraceGraph(TEAM).fan_outs().tolist() == [1, 5]


def test_a_broadcast_is_a_branch_point():
    """One delegation to two agents starts two lines; a message to one starts one."""
    trace = trace_of(
        make("act", 0, "a"),
        make("delegate", 1, "a", (0, "authorizes"), to=("b", "c")),
        make("act", 2, "a", (0, "precedes")),
        make("message", 3, "a", (2, "authorizes"), to=("b",)),
        make("message", 4, "b", (2, "precedes"), to=("c", "a")),
    )
    assert TraceGraph(trace).fan_outs().tolist() == [0]


def test_a_join_puts_the_work_of_two_agents_together():
    """The observation that shows x's and y's messages is the join, though y's came by a delivery
    that bears the receiver's name; the lead's own past does not make one.
    """
    assert TraceGraph(TEAM).joins().tolist() == [11]
    delivered = trace_of(
        make("message", 0, "x", to=("a",)),
        make("message", 1, "y", to=("a",)),
        make("deliver", 2, "a", (0, "delivers"), message=0),
        make("deliver", 3, "a", (1, "delivers"), message=1),
        make("observe", 4, "a", (2, "consumes"), (3, "consumes")),
        make("observe", 5, "a", (2, "consumes"), (4, "precedes")),
    )
    assert TraceGraph(delivered).joins().tolist() == [4]
    one = trace_of(
        make("act", 0, "b"),
        make("act", 1, "a"),
        make("observe", 2, "a", (1, "precedes"), (0, "consumes")),
        make("aggregate", 3, "a", (0, "aggregates"), (1, "aggregates")),
    )
    assert TraceGraph(one).joins().tolist() == [3]


def test_the_order_of_the_file_is_a_topological_order():
    """Every edge of the graph goes forward in the order given, whatever the file claimed."""
    trace = trace_of(make("act", 0, "a", 1), make("act", 1, "a", 0), make("act", 2, "a", 2, 1))
    graph = TraceGraph(trace)
    place = {seq: i for i, seq in enumerate(graph.topological_order().tolist())}
    assert list(place) == [0, 1, 2]
    assert graph.edges() == [Edge(0, 1, "derives"), Edge(1, 2, "derives")]
    assert all(place[edge.cause] < place[edge.effect] for edge in graph.edges())
    assert graph.dangling == 2


def test_the_critical_path_is_the_longest_in_seconds():
    """0 (1 s) → 1 (5 s) → 3 (1 s) beats 0 → 2 (2 s) → 3, and its length is 1 + 5 + 1."""
    trace = trace_of(
        make("act", 0, "a", t_start=0.0, t_end=1.0),
        make("act", 1, "b", 0, t_start=1.0, t_end=6.0),
        make("act", 2, "c", 0, t_start=1.0, t_end=3.0),
        make("act", 3, "a", 1, 2, t_start=6.0, t_end=7.0),
    )
    path = TraceGraph(trace).critical_path()
    assert path.seqs.tolist() == [0, 1, 3]
    assert (path.length, path.unit) == (7.0, "seconds")


@pytest.mark.parametrize("causes", [(0, 2), (2, 0), (2, 2)])
def test_the_longer_way_is_taken_in_whatever_order_causes_stand(causes):
    """0 → 1 → 2 → 3 has four events, the shortcut 0 → 3 two."""
    chain = [make("act", 0, "a"), make("act", 1, "a", 0), make("act", 2, "a", 1)]
    path = TraceGraph(trace_of(*chain, make("act", 3, "a", *causes))).critical_path()
    assert (path.seqs.tolist(), path.length) == ([0, 1, 2, 3], 4.0)


def test_without_clocks_the_critical_path_counts_events():
    """Through y the team's chain has ten events (its message is delivered), through x nine."""
    path = TraceGraph(TEAM).critical_path()
    assert path.seqs.tolist() == [0, 1, 3, 6, 7, 9, 10, 11, 12, 14]
    assert (path.length, path.unit) == (10.0, "events")


def test_odd_clocks_count_nothing():
    """An end before its start and a missing end are no time; the one event that took 2 s is all."""
    trace = trace_of(
        make("act", 0, "a", t_start=5.0, t_end=1.0),
        make("act", 1, "a", 0, t_start=1.0, t_end=3.0),
        make("act", 2, "a", 1, t_start=3.0),
    )
    path = TraceGraph(trace).critical_path()
    assert (path.length, path.unit) == (2.0, "seconds")
    assert path.seqs.tolist() == [0, 1]


def test_of_equal_paths_the_one_through_the_later_cause_is_named():
    """Two causes that took no time: the path still reaches back, through the later one."""
    trace = trace_of(
        make("act", 0, "a"), make("act", 1, "b"), make("act", 2, "a", 0, 1, t_start=0.0, t_end=2.0)
    )
    assert TraceGraph(trace).critical_path().seqs.tolist() == [1, 2]


def test_an_empty_trace_is_a_graph():
    """No events: no edges, an empty path, and still an answer to each question."""
    graph = TraceGraph(trace_of())
    assert graph.critical_path().seqs.tolist() == []
    assert graph.topological_order().tolist() == graph.joins().tolist() == []
    assert graph.fan_outs().tolist() == graph.edges() == []
    assert graph.is_linear()
    with pytest.raises(Refused, match="trace t has no event 3"):
        graph.ancestors(3)


# -- descent -----------------------------------------------------------------------------------


def stoppable(verb):
    return trace_of(
        make("observe", 0, "b"),
        make("act", 1, "b", 0),
        make("observe", 2, "a"),
        make("act", 3, "a", 2, items=(Item(verb=verb),)),
        make("observe", 4, "c", (3, "precedes", ORDER)),
        make("act", 5, "c", 4),
    )


def test_what_follows_a_declined_stop_descends_from_it():
    """A could have stopped the run: c's turn, which no edge but order links to a, descends from a's
    act and from what a saw, and still not from b's.
    """
    graph = TraceGraph(stoppable("no_stop"))
    assert graph.ancestors(5, descent=True).tolist() == [2, 3, 4]
    assert graph.descendants(2, descent=True).tolist() == [3, 4, 5]
    assert graph.descendants(0, descent=True).tolist() == [1]


def test_a_reward_hangs_on_no_stop_after_the_last_of_its_causes():
    """What b had done was there before a declined to stop: paid after the stop, it is b's; what
    was paid before the stop, or for the whole run, might not have come at all.
    """

    def paid(*causes):
        events = [
            make("act", 0, "b"),
            make("observe", 1, "b", 0),
            make("act", 2, "a", items=(Item(verb="no_stop"),)),
            make("act", 3, "a", 2),
        ]
        events.append(make("stop", 4, "a", 3, reason="answered"))
        rewards = [(seq, "rewards") for seq in causes]
        return TraceGraph(trace_of(*events, make("reward", 5, "env", *rewards, amount=1.0)))

    assert paid(1).ancestors(5, descent=True).tolist() == [0, 1]
    assert paid(1).behind(5) == ("b",)
    assert 5 not in paid(1).descendants(2, descent=True)
    assert 5 in paid(1).descendants(0, descent=True)
    assert paid(1, 4).ancestors(5, descent=True).tolist() == [0, 1, 2, 3, 4]
    unstopped = trace_of(
        make("act", 0, "b"),
        make("act", 1, "a", items=(Item(verb="no_stop"),)),
        make("reward", 2, "env", (0, "rewards"), amount=1.0),
    )
    assert TraceGraph(unstopped).ancestors(2, descent=True).tolist() == [0, 1]


def test_order_alone_is_no_descent():
    """Where nothing was declined, an edge that was inferred from order carries no credit."""
    graph = TraceGraph(stoppable("none"))
    assert graph.ancestors(5).tolist() == [2, 3, 4]
    assert graph.ancestors(5, descent=True).tolist() == [4]
    assert graph.descendants(3, descent=True).tolist() == []


def test_an_act_that_declines_to_stop_is_not_its_own_ancestor():
    """The act that holds `no_stop` is left out of its own ancestors and descendants."""
    graph = TraceGraph(stoppable("no_stop"))
    assert graph.ancestors(3, descent=True).tolist() == [2]
    assert graph.descendants(3, descent=True).tolist() == [4, 5]


# -- the linear special case --------------------------------------------------------------------


def test_the_old_trajectory_is_the_linear_special_case():
    """s0 a0 s1 a1 is linear with the second edge that a full record has, and with rewards aside."""
    trajectory = [
        make("observe", 0, "a"),
        make("act", 1, "a", 0),
        make("observe", 2, "a", (0, "precedes"), (1, "precedes")),
        make("reward", 3, "env", (1, "rewards"), amount=1.0),
        make("act", 4, "a", 2),
    ]
    assert TraceGraph(trace_of(*trajectory)).is_linear()
    assert not TraceGraph(TEAM).is_linear()


def test_two_parallel_calls_are_not_linear():
    """One act with two calls: the second does not follow on the first."""
    trace = trace_of(
        make("act", 0, "a"),
        make("tool_call", 1, "a", (0, "authorizes"), tool="t"),
        make("tool_call", 2, "a", (0, "authorizes"), tool="t"),
    )
    assert not TraceGraph(trace).is_linear()


def test_a_log_that_knows_only_an_order_is_linear():
    """Edges inferred from order suffice."""
    trace = trace_of(make("act", 0, "a"), make("act", 1, "b", (0, "precedes", ORDER)))
    assert TraceGraph(trace).is_linear()


# -- damaged and partial traces -----------------------------------------------------------------


def test_an_event_that_is_its_own_ancestor_takes_finite_time():
    """X (parent A), B (parent X), X again (parent B): the finding names X, no question hangs, the
    first X is X. Written as two events that cause each other, the loop loses its edge forward.
    """
    again = trace_of(
        make("act", 0, "a"), make("act", 1, "x", 0), make("act", 2, "b", 1), make("act", 1, "x", 2)
    )
    assert [f.seq for f in validate([again]).findings if f.rule == "V03"] == [1]
    graph = TraceGraph(again)
    assert graph.ancestors(2).tolist() == [0, 1]
    assert graph.descendants(0).tolist() == [1, 2]
    assert graph.critical_path().seqs.tolist() == [0, 1, 2, 1]
    assert graph.topological_order().tolist() == [0, 1, 2, 1]
    loop = TraceGraph(
        trace_of(make("act", 0, "a"), make("act", 1, "x", 0, 2), make("act", 2, "b", 1))
    )
    assert loop.dangling == 1
    assert loop.ancestors(2).tolist() == [0, 1]
    assert loop.ancestors(1).tolist() == [0]


def test_missing_causes_are_counted():
    """A gap in seq leaves the events around it connected as far as they say; a cause that is not
    there is left out and counted.
    """
    graph = TraceGraph(
        trace_of(make("act", 0, "a"), make("act", 5, "a", 0, 3), make("act", 9, "a", 5))
    )
    assert graph.ancestors(9).tolist() == [0, 5]
    assert (graph.dangling, graph.outside) == (1, 0)


def test_a_fork_points_into_its_parent():
    """Causes below the fork's first seq are the parent's events: outside, not dangling."""
    fork = ForkRef(trace_id="p", seq=10, digest="0" * 32, do="mute")
    graph = TraceGraph(
        trace_of(make("act", 10, "a", 4, 9), make("act", 11, "a", 10, 10, 12), fork=fork)
    )
    assert (graph.outside, graph.dangling) == (2, 1)
    assert graph.ancestors(11).tolist() == [10]
    assert len(graph.prefix(11)) == 1
    assert graph.prefix(11).outside == 2


# -- against the slow, obvious versions -----------------------------------------------------------


@st.composite
def traces(draw):
    """Up to 14 events whose seqs may repeat or skip, with causes that may point anywhere."""
    n = draw(st.integers(0, 14))
    tidy = draw(st.booleans())
    seqs = list(range(n)) if tidy else draw(st.lists(st.integers(0, 16), min_size=n, max_size=n))
    cause = st.builds(
        Cause,
        seq=st.integers(-1, 17),
        kind=st.sampled_from(["derives", "precedes", "consumes"]),
        basis=st.sampled_from(["recorded", ORDER]),
    )
    took = st.none() | st.integers(0, 5).map(float)
    events = []
    for seq in seqs:
        links = tuple(draw(st.lists(cause, max_size=3)))
        agent = draw(st.sampled_from("ab"))
        common = {"trace_id": "t", "seq": seq, "agent": agent, "causes": links}
        what = draw(st.sampled_from(["observe", "observe", "act", "act", "stop", "reward"]))
        if what == "observe":
            events.append(Observe(**common, t_start=0.0, t_end=draw(took)))
        elif what == "stop":
            events.append(Stop(**common, reason="answered"))
        elif what == "reward":
            events.append(Reward(**common, amount=1.0))
        else:
            verbs = draw(st.lists(st.sampled_from(["no_stop", "none"]), max_size=1))
            events.append(Act(**common, items=tuple(Item(verb=verb) for verb in verbs)))
    return trace_of(*events)


def edges_of(trace, descent=False):
    """(earlier row, later row), by looking each cause up in the events before it."""
    found = []
    for row, event in enumerate(trace.events):
        for cause in event.causes:
            rows = [r for r, e in enumerate(trace.events) if e.seq == cause.seq]
            if rows and rows[0] < row and not (descent and cause.basis == ORDER):
                found.append((rows[0], row))
    if descent:
        for row, event in enumerate(trace.events):
            if isinstance(event, Act) and any(item.verb == "no_stop" for item in event.items):
                found += [(row, later) for later in range(row + 1, len(trace.events))
                          if row < until(trace, later)]  # fmt: skip
    return found


def until(trace, row):
    """The row before which it has to go on for this event to come as it does."""
    event = trace.events[row]
    causes = [r for r, e in enumerate(trace.events[:row]) for c in event.causes
              if e.seq == c.seq and c.basis != ORDER
              and all(e.seq != x.seq for x in trace.events[:r])]  # fmt: skip
    stopped = any(isinstance(e, Stop) for e in trace.events[:row])
    return max(causes) if isinstance(event, Reward) and stopped and causes else row


def closure(edges, start):
    reached, todo = set(), [start]
    while todo:
        here = todo.pop()
        for a, b in edges:
            if a == here and b not in reached:
                reached.add(b)
                todo.append(b)
    return reached


@pytest.mark.slow
@given(traces(), st.booleans())
def test_reachability_agrees_with_a_search(trace, descent):
    """Ancestors and descendants of every event are what a search finds, with seqs that
    repeat, skip or point forward, and with descent as the format page words it.
    """
    graph, edges = TraceGraph(trace), edges_of(trace, descent)
    backwards = [(b, a) for a, b in edges]
    for row, event in enumerate(trace.events):
        if any(e.seq == event.seq for e in trace.events[:row]):
            continue
        for rows, got in (
            (closure(edges, row), graph.descendants(event.seq, descent=descent)),
            (closure(backwards, row), graph.ancestors(event.seq, descent=descent)),
        ):
            assert got.tolist() == sorted({trace.events[r].seq for r in rows})


@pytest.mark.slow
@given(traces())
def test_the_critical_path_agrees_with_all_paths(trace):
    """Its length is the largest over all paths, it is a path, and its events add up to it."""
    edges, events = edges_of(trace), trace.events
    path = TraceGraph(trace).critical_path()
    took = [(e.t_end or 0.0) - (e.t_start or 0.0) for e in events]
    if not any(took):
        took = [1.0] * len(events)

    def longest(row):
        return took[row] + max((longest(a) for a, b in set(edges) if b == row), default=0.0)

    assert path.length == max(map(longest, range(len(events))), default=0.0)
    pairs = {(events[a].seq, events[b].seq) for a, b in edges}
    assert set(zip(path.seqs.tolist(), path.seqs.tolist()[1:], strict=False)) <= pairs


@pytest.mark.slow
@given(traces(), st.integers(0, 16))
def test_a_prefix_is_the_graph_of_the_prefix(trace, t):
    """Slicing the arrays gives what laying out the shorter trace anew gives."""
    sliced, anew = TraceGraph(trace).prefix(t), TraceGraph(trace[:t])
    assert sliced.trace == anew.trace
    assert sliced.edges() == anew.edges()
    assert sliced.dangling == anew.dangling
    assert sliced.joins().tolist() == anew.joins().tolist()
    assert sliced.critical_path().seqs.tolist() == anew.critical_path().seqs.tolist()
    for name in Columns._fields[1:5]:
        np.testing.assert_array_equal(getattr(sliced.table, name), getattr(anew.table, name))


def test_a_seq_that_stands_twice_means_its_first_event():
    """Also where a gap before it shifts the second one to the place that the number suggests."""
    trace = trace_of(
        make("act", 0, "a"), make("act", 2, "a"), make("act", 2, "a"), make("act", 3, "a", 2)
    )
    assert columns([trace]).cause.tolist() == [1]


@pytest.mark.slow
@given(st.lists(traces(), max_size=4))
def test_columns_of_many_traces_are_those_of_each(many):
    """A cause is looked up in its own trace alone, and is the first event that bears its seq."""
    table = columns(many)
    for index, trace in enumerate(many):
        alone = columns([trace])
        mine = (table.effect >= table.start[index]) & (table.effect < table.start[index + 1])
        shifted = np.where(alone.cause < 0, -1, alone.cause + table.start[index])
        assert table.cause[mine].tolist() == shifted.tolist()
        seqs = [e.seq for e in trace.events]
        wanted = [c.seq for e in trace.events for c in e.causes]
        assert alone.cause.tolist() == [seqs.index(w) if w in seqs else -1 for w in wanted]


def test_deep_dead_ends_are_told_from_ancestors():
    """Two agents of 400 acts each that hear from each other in the first 40 events only: the long
    life of one that is never read again is neither among the other's ancestors nor descendants.
    """
    events, rng = [], random.Random(1)
    led_to = {}
    for seq in range(800):
        causes = [seq - 2] * (seq > 1) + [rng.randrange(max(seq, 1))] * (0 < seq < 40)
        events.append(make("act", seq, "ab"[seq % 2], *causes))
        led_to[seq] = set(causes).union(*(led_to[cause] for cause in causes))
    graph = TraceGraph(trace_of(*events))
    for seq in (799, 650, 301, 39, 2, 1, 0):
        assert graph.ancestors(seq).tolist() == sorted(led_to[seq])
        assert graph.descendants(seq).tolist() == [e for e in range(800) if seq in led_to[e]]


@pytest.mark.slow
def test_a_long_chain_needs_no_recursion():
    """1e5 events in one chain with a cycle claimed at every step: each question within seconds."""
    n, rng = 100_000, random.Random(0)
    events = [
        make("act", i, "ab"[i % 2], *([i - 1] if i else []), i + 1, rng.randrange(n))
        for i in range(n)
    ]
    graph = TraceGraph(trace_of(*events))
    began = time.process_time()
    assert len(graph.ancestors(n - 1)) == len(graph.descendants(0)) == n - 1
    assert graph.critical_path().length == n
    assert time.process_time() - began < 10
