"""The rule about who is there: agents between birth and end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from counterpoint.graph import KIND_CODE
from counterpoint.groups import Bools, Ints
from counterpoint.schema import Despawn, Finding, Spawn
from counterpoint.validate.chunk import Chunk, before, short
from counterpoint.validate.order import EFFECTS
from counterpoint.vocabulary import RESERVED


def lived(chunk: Chunk) -> Iterator[Finding]:
    """V05: an agent acts only between its spawn (or the start) and its despawn.

    An agent that neither starts nor is ever spawned breaks it only where the trace says who there
    is: the header lists the agents of the start, and the trace spawns some or delivers explicitly.
    In a fork an agent may have been born in the parent. One finding for each agent and fault, at
    its first event.
    """
    turns, of = _turns(chunk)
    acts = chunk.rows("act", *EFFECTS)
    reserved = np.array([agent in RESERVED for agent in chunk.table.agents], dtype=bool)
    acts = acts[~reserved[chunk.table.agent[acts]]]
    owner = chunk.owner[acts]
    last = before(owner, acts, of, turns)
    dead = last >= 0
    dead[dead] = chunk.table.kind[last[dead]] == KIND_CODE["despawn"]
    unborn = (last < 0) & ~_at_start(chunk)[owner] & ~chunk.in_fork[acts]
    later = np.isin(owner, of[chunk.among("spawn")[turns]])
    told = _says_who(chunk)[chunk.table.trace[acts]]
    for rows, says in (
        (acts[dead], "acts after its despawn"),
        (acts[unborn & later], "acts before its spawn"),
        (acts[unborn & ~later & told], "acts, but is not there at the start and is never spawned"),
    ):
        for row in rows[np.unique(chunk.owner[rows], return_index=True)[1]].tolist():
            message = f"the agent {short(chunk.events[row].agent)} {says}"
            yield chunk.finding("V05", row, message, "agent")


def _turns(chunk: Chunk) -> tuple[Ints, Ints]:
    """Rows of spawns and despawns, and the pair (trace, child) that each is about."""
    code = {agent: k for k, agent in enumerate(chunk.table.agents)}
    rows = chunk.rows("spawn", "despawn")
    events = (chunk.events[row] for row in rows.tolist())
    children = [code.get(e.child, -1) for e in events if isinstance(e, Spawn | Despawn)]
    return rows, chunk.owners(chunk.table.trace[rows], np.array(children, dtype=np.int64))


def _at_start(chunk: Chunk) -> Bools:
    """(pairs of trace and agent,) whether the header lists the agent as alive at the start."""
    code = {agent: k for k, agent in enumerate(chunk.table.agents)}
    named = [
        (index, code[agent.id])
        for index, trace in enumerate(chunk.traces)
        for agent in trace.header.agents
        if agent.id in code
    ]
    listed = np.array(named, dtype=np.int64).reshape(-1, 2)
    out = np.zeros(len(chunk.traces) * (len(code) + 1), dtype=bool)
    out[chunk.owners(listed[:, 0], listed[:, 1])] = True
    return out


def _says_who(chunk: Chunk) -> Bools:
    """(traces,) whether a trace claims to name every agent that it has."""
    headers = [trace.header for trace in chunk.traces]
    listed = np.array([bool(header.agents) for header in headers], dtype=bool)
    says = np.array([header.delivery == "explicit" for header in headers], dtype=bool)
    says[chunk.table.trace[chunk.rows("spawn")]] = True
    says &= listed
    return says
