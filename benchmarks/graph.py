"""A trace as a graph against general graph libraries: order, ancestors, prefix, critical path.

Both sides start from a graph that is built already and are asked the same question; the answers
are compared before anything is timed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import networkx as nx
import rustworkx as rx

from counterpoint.graph import TraceGraph
from counterpoint.schema import KINDS, AgentRef, Cause, Header, Source, Trace

EVENTS = 100_000
REPEATS = 5
GOALS = {"networkx": 50.0, "rustworkx": 5.0}


def random_trace(events: int, agents: int = 8, seed: int = 0) -> Trace:
    """A team of equals: whoever's turn it is reads its mailbox, acts, and either writes to another
    agent or calls a tool and reads the result at its next turn. About two edges an event.
    """
    draw = random.Random(seed)
    names = [f"agent{i}" for i in range(agents)]
    life: dict[str, list[int]] = {name: [] for name in names}
    inbox: dict[str, list[int]] = {name: [] for name in names}
    made: list[Any] = []

    def add(kind: str, agent: str, causes: list[tuple[int, str]], **fields: Any) -> int:
        links = tuple(Cause(seq=seq, kind=edge) for seq, edge in causes)  # type: ignore[arg-type]
        start = float(len(made))
        clock = {"t_start": start, "t_end": start + draw.random()}
        event = KINDS[kind](
            trace_id="t", seq=len(made), agent=agent, causes=links, **clock, **fields
        )
        made.append(event)
        return event.seq

    while len(made) < events:
        me = draw.choice(names)
        read, inbox[me] = inbox[me], []
        past = [(seq, "precedes") for seq in life[me]]
        sources = tuple(Source(seq=seq) for seq in read)
        shown = add("observe", me, past + [(seq, "consumes") for seq in read], sources=sources)
        act = add("act", me, [(shown, "derives")])
        life[me] = [shown, act]
        if draw.random() < 0.5:
            other = draw.choice(names)
            inbox[other].append(add("message", me, [(act, "authorizes")], to=(other,)))
        else:
            call = add("tool_call", me, [(act, "authorizes")], tool="search")
            inbox[me].append(add("tool_result", me, [(call, "answers")], call=call))
    refs = tuple(AgentRef(id=name, role="peer") for name in names)
    return Trace(Header(trace_id="t", counterpoint=1, agents=refs), tuple(made[:events]))


def rows() -> list[dict[str, Any]]:
    """One row per job and peer: {job, ours, peer, peer_name, ratio, goal}, seconds of CPU time."""
    trace = random_trace(EVENTS)
    graph, last, half = TraceGraph(trace), EVENTS - 1, EVENTS // 2
    net, rust = _peers(graph)
    assert (
        set(graph.ancestors(last).tolist()) == nx.ancestors(net, last) == rx.ancestors(rust, last)
    )
    assert (
        _seconds(graph, graph.critical_path().seqs.tolist())
        >= _seconds(graph, nx.dag_longest_path(net, weight="took")) - 1e-6
    )
    jobs: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]] = {
        "topological order": (
            lambda: TraceGraph(trace, graph.table).topological_order(),
            lambda: list(nx.topological_sort(net)),
            lambda: rx.topological_sort(rust),
        ),
        "ancestors of the last event": (
            lambda: graph.ancestors(last),
            lambda: nx.ancestors(net, last),
            lambda: rx.ancestors(rust, last),
        ),
        "descendants of the first event": (
            lambda: graph.descendants(0),
            lambda: nx.descendants(net, 0),
            lambda: rx.descendants(rust, 0),
        ),
        "prefix of half the events": (
            lambda: graph.prefix(half),
            lambda: net.subgraph(range(half)).copy(),
            lambda: rust.subgraph(range(half)),
        ),
        "critical path": (
            graph.critical_path,
            lambda: nx.dag_longest_path(net, weight="took"),
            lambda: rx.dag_weighted_longest_path(rust, lambda a, b, took: took),
        ),
    }
    return [row for job, sides in jobs.items() for row in _compared(job, *sides)]


def _peers(graph: TraceGraph) -> tuple[Any, Any]:
    """The same graph in networkx and rustworkx; an edge weighs what its later event took."""
    table = graph.table
    took = (table.t_end - table.t_start)[table.effect].tolist()
    edges = list(zip(table.cause.tolist(), table.effect.tolist(), took, strict=True))
    net, rust = nx.DiGraph(), rx.PyDiGraph()
    net.add_nodes_from(range(len(graph)))
    net.add_weighted_edges_from(edges, weight="took")
    rust.add_nodes_from(range(len(graph)))
    rust.add_edges_from(edges)
    return net, rust


def _seconds(graph: TraceGraph, seqs: list[int]) -> float:
    """What the events of a path took, but for its first, which no edge of the peers weighs."""
    table = graph.table
    return float((table.t_end - table.t_start)[seqs[1:]].sum())


def _compared(job: str, ours: Callable[[], Any], *peers: Callable[[], Any]) -> list[dict[str, Any]]:
    times: list[list[float]] = [[] for _ in (ours, *peers)]
    for _ in range(REPEATS):
        for taken, run in zip(times, (ours, *peers), strict=True):
            began = time.process_time()
            run()
            taken.append(time.process_time() - began)
    mine, *theirs = map(median, times)
    return [
        {
            "job": f"{job}, {EVENTS} events",
            "ours": mine,
            "peer": peer,
            "peer_name": name,
            "ratio": peer / mine,
            "goal": goal,
        }
        for (name, goal), peer in zip(GOALS.items(), theirs, strict=True)
    ]
