"""(d) Add an environment: one of three doors hides a prize, a scout sees it, a leader opens."""

from counterpoint import Env, check_env, tool


class Doors(Env):
    id = "doors-v0"
    roles = {"scout": ["message"], "leader": ["open"]}

    def reset(self, task_seed):
        self.prize, self.opened = task_seed % 3, None

    def agents(self):
        return ["scout", "leader"] if self.opened is None else []  # empty ends the run

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
        return [(float(self.opened == self.prize), None)]  # (amount, target)


if __name__ == "__main__":
    print(check_env(Doors()))
