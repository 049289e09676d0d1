"""The command `counterpoint fork`: what the function gives, and a sentence for what it cannot."""

import json
import sys

import pytest

from counterpoint.cli import main
from counterpoint.envs import make
from counterpoint.formats import read
from counterpoint.harness import rollout
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import fork, replay
from counterpoint.save import save, trace_lines
from counterpoint.validate import validate

# -- the command -------------------------------------------------------------------------------


def cli(capfd, *arguments):
    """(status, JSON or text, stderr) of a command, run as a person would."""
    old, sys.argv = sys.argv, ["counterpoint", *map(str, arguments)]
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code or 0
    finally:
        sys.argv = old
    out, err = capfd.readouterr()
    return status, json.loads(out) if out.startswith("{") else out, err


@pytest.fixture
def file(tmp_path):
    traces = rollout(make("ledger-v0"), Softmax(), groups=4, rollouts=4, seed=1)
    save(tmp_path / "r.jsonl", (line for t in traces for line in trace_lines(t)))
    return tmp_path / "r.jsonl", next(t for t in traces if t.of("delegate"))


def test_the_command_gives_what_the_function_gives(file, capfd):
    """The keys of the issue, the same branches, and the file that -o names."""
    path, trace = file
    out = path.with_name("b.jsonl")
    status, told, _ = cli(capfd, "fork", path, "--trace", trace.trace_id, "--at", "first:delegate",
                          "--do", "mute", "-n", "6", "-o", out, "--json")  # fmt: skip
    found = fork(trace, trace.of("delegate")[0], "mute", n=6)
    assert status == 0
    assert told["branches"] == [
        {"trace_id": t.trace_id, "outcome": t.outcome} for t in found.traces
    ]
    assert (told["seq"], told["level"], told["cached"]) == (
        trace.of("delegate")[0].seq,
        "channel",
        0,
    )
    assert told["spent"] == vars(found.spent)
    assert tuple(read(out)) == found.traces


def test_branches_that_are_there_are_not_played_again(file, capfd):
    """They are known by their id, counted as cached, cost nothing, and are not written twice."""
    path, trace = file
    given = ("fork", path, "--trace", trace.trace_id, "--at", "first:delegate", "--do", "keep")
    cli(capfd, *given, "-n", "4", "-o", path, "--append")
    before = len(list(read(path)))
    _, told, _ = cli(capfd, *given, "-n", "6", "-o", path, "--append", "--json")
    assert (told["cached"], len(told["branches"])) == (4, 6)
    assert len(list(read(path))) == before + 2
    assert not validate(list(read(path))).findings
    _, again, _ = cli(capfd, *given, "-n", "6", "--json")
    assert (again["cached"], again["spent"]["forward_passes"]) == (6, 0)
    assert again["branches"] == told["branches"]


def test_a_branch_that_was_changed_is_not_taken_for_one(file, capfd):
    """A corrupt cache is a sentence, exit 1, and not a number."""
    path, trace = file
    given = ("fork", path, "--trace", trace.trace_id, "--at", "first:delegate", "--do", "keep")
    cli(capfd, *given, "-n", "2", "-o", path, "--append")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    status, _, err = cli(capfd, *given, "-n", "2")
    assert status == 1
    assert "is there already but was torn or changed" in err


def test_a_fork_of_a_fork_finds_its_parents_in_the_file(file, capfd):
    """And says so where they are not."""
    path, trace = file
    given = ("fork", path, "--trace", trace.trace_id, "--at", "first:delegate", "--do", "keep")
    _, told, _ = cli(capfd, *given, "-n", "1", "-o", path, "--append", "--json")
    child = told["branches"][0]["trace_id"]
    status, again, _ = cli(capfd, "fork", path, "--trace", child, "--at", "last:act", "--do",
                           "resample", "-n", "2", "--json")  # fmt: skip
    assert status == 0
    assert again["parent"] == child
    alone = path.with_name("alone.jsonl")
    (branch,) = [t for t in read(path) if t.trace_id == child]
    save(alone, trace_lines(branch))
    status, _, err = cli(capfd, "fork", alone, "--at", "last:act", "--do", "keep", "-n", "1")
    assert status == 1
    assert "has to be at hand (in the same file or folder)" in err


def test_the_command_shows_people_where_branches_part(file, capfd):
    """A table for people, and a note that other traces are there."""
    path, _ = file
    status, text, err = cli(capfd, "fork", path, "--at", "first:act", "--do", "resample", "-n", "3")
    assert status == 0
    assert "the first of 16 traces" in err
    assert "95 % interval" in text
    assert "run / branch" in text


def test_the_command_refuses_in_one_line(file, capfd):
    """Exit 1 and a sentence, whatever is asked; exit 2 for wrong usage."""
    path, trace = file
    for extra, sentence in (
        (("--at", "999", "--do", "keep", "-n", "1"), "has no event 999"),
        (("--at", "1", "--do", "keep", "-n", "0"), "0 branches play nothing"),
        (
            ("--trace", trace.trace_id, "--at", "1", "--do", "mute", "-n", "1"),
            "the nearest event that can is",
        ),
        (
            ("--trace", "nobody", "--at", "1", "--do", "keep", "-n", "1"),
            "does not hold a trace nobody",
        ),
        (("--at", "1", "--do", "keep", "-n", "1", "-o", path), "exists; choose another name"),
    ):
        status, _, err = cli(capfd, "fork", path, *extra)
        assert status == 1
        assert err.count("\n") <= 2
        assert "refused: " in err
        assert sentence in err
    assert cli(capfd, "fork", path)[0] == 2
    assert replay(trace).identical == 1


def test_an_environment_of_ones_own_is_named_by_its_file(tmp_path, capfd):
    """As for record: file.py:Class, with the options that the header holds."""
    source = tmp_path / "mine.py"
    source.write_text(
        "from counterpoint import Env\n\n\nclass Coin(Env):\n"
        "    id, roles = 'coin-v0', {'a': ['stop']}\n"
        "    def legal(self, agent):\n        return ['stop: 0', 'stop: 1']\n"
        "    def rewards(self, trace):\n"
        "        return [(float(trace.of('stop')[0].answer), None)]\n"
    )
    env = make(f"{source}:Coin")
    traces = rollout(env, Softmax(), groups=1, rollouts=1)
    save(tmp_path / "r.jsonl", trace_lines(traces[0]))
    given = ("fork", tmp_path / "r.jsonl", "--at", "first:act", "--do", "resample", "-n", "50")
    assert "give it as env=" in cli(capfd, *given)[2]
    status, told, _ = cli(capfd, *given, "--env", f"{source}:Coin", "--json")
    assert status == 0
    assert abs(told["mean"] - 0.5) < 4 * told["stderr"]
