"""(a) Log your own loop: nothing of Counterpoint is needed but the Recorder."""

import sys

from counterpoint import Recorder

question, found = "What is the capital of Peru?", "Lima has been the capital since 1535."


def ask(agent, text):  # your own model goes here
    return {"planner": "look it up", "worker": "Lima" if "Lima" in text else "search"}[agent]


def main(path="runs.jsonl"):
    with Recorder(path) as rec:
        for i in range(4):
            with rec.trace(task_id="capital-of-peru") as t:
                t.act("planner", ask("planner", question))
                t.message("planner", to="worker", content="look it up")
                t.act("worker", ask("worker", "look it up"))
                call = t.tool_call("worker", "search", {"q": question})
                t.tool_result(call, found if i else "nothing found")
                final = t.act("worker", ask("worker", found if i else ""))
                t.stop("worker", answer=final.text)
                t.reward(float(final.text == "Lima"))


if __name__ == "__main__":
    main(*sys.argv[1:])
