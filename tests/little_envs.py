"""Small environments for tests, that together use every part of the stage.

Golden traces were played in them: what they do is not changed, another one is added.
"""

from __future__ import annotations

from typing import ClassVar

from counterpoint.envs import Amount, Env, tool


class Doors(Env):
    """A scout sees the prize and tells; a leader opens. Everything goes by turns."""

    id = "doors-v0"
    roles: ClassVar = {"scout": ["message"], "leader": ["open"]}

    def reset(self, task_seed):
        self.prize, self.opened = task_seed % 3, None

    def agents(self):
        return ["scout", "leader"] if self.opened is None else []

    def observe(self, agent):
        return f"the prize is behind door {self.prize}" if agent == "scout" else "open a door"

    def legal(self, agent):
        say = "message leader: {}" if agent == "scout" else 'call open {{"door": {}}}'
        return {str(door): say.format(door) for door in range(3)}

    @tool
    def open(self, door: int) -> str:
        self.opened = door
        return "prize" if door == self.prize else "nothing"

    def rewards(self, trace):
        return [(float(self.opened == self.prize), None)]


class Fog(Doors):
    """Doors with a noisy look first: right with probability .8, each other door with .1."""

    id = "fog-v0"
    roles: ClassVar = {"scout": ["message", "look"], "leader": ["open", "stop"]}

    def legal(self, agent):
        if agent == "scout":
            say = "call look {{}}\nmessage leader: {}"
        else:
            say = 'call open {{"door": {}}}\nstop: {}'
        menu = {str(door): say.format(*[door] * 2) for door in range(3)}
        return {**menu, "wait": "none"}

    @tool(pure=True)
    def look(self, draws) -> int:
        return draws.choice([0.8 if door == self.prize else 0.1 for door in range(3)])

    def rewards(self, trace):
        yield float(self.opened == self.prize), None
        yield Amount(-0.1 * len(trace.of("tool_call")), channel="cost", family="R7")
        yield Amount(1.0, "scout", channel="looks", verifiable="count")


class Office(Env):
    """Spawns, delegates and their waits, messages, shared memory, an aggregate, returns: no turns
    decided by the environment, so that two agents' lives run beside each other.
    """

    id = "office-v0"
    roles: ClassVar = {
        "boss": ["spawn", "delegate", "message", "aggregate", "write", "read", "stop", "despawn"],
        "clerk": ["return", "message", "dice", "count", "write", "read"],
    }

    def start(self):
        return {"boss": "boss"}

    def reset(self, task_seed):
        self.sum, self.secret = 0, task_seed % 5

    def observe(self, agent):
        view = self.view(agent)
        jobs = f"{len(view.jobs)} jobs"
        return {"you": agent, "jobs": jobs} if view.jobs else None

    def legal(self, agent):
        view = self.view(agent)
        if agent == "boss":
            return self._boss(view)
        menu = {
            "roll": 'call dice {"sides": 2}\ncall count {}',
            "tell": "message boss: hello",
            "note": 'write note: seen\ncall dice {"sides": 3}',
        }
        if view.jobs:
            menu["return"] = "a word of prose\nreturn: done"
        return menu

    def _boss(self, view):
        clerks = [name for name in view.alive if name != "boss"]
        menu = {"hire": "spawn clerk: count the beans", "wait": "none", "quit": "stop: enough"}
        for name in clerks:
            menu[f"ask {name}"] = f"delegate {name}: roll\nmessage {name}: soon"
            menu[f"fire {name}"] = f"despawn {name}\nwrite note: fired"
        if clerks:
            menu["sum"] = "aggregate sum: all\nstop: enough"
        return menu

    @tool
    def dice(self, sides: int, draws) -> int:
        self.sum += 1 + draws.choice([1 / sides] * sides)
        return self.sum

    @tool
    def count(self) -> int:
        return self.sum

    def rewards(self, trace):
        yield float(self.sum % 5 == self.secret), None
        yield Amount(-0.1 * len(trace.of("spawn")), channel="cost", family="R7")
