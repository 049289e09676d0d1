"""The command `counterpoint fork`: what the function gives, and a sentence for what it cannot."""

import json
import sys
from pathlib import Path

import pytest

from counterpoint.cli import main
from counterpoint.envs import make
from counterpoint.formats import read
from counterpoint.harness import rollout
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import fork, replay
from counterpoint.save import save, trace_lines
from counterpoint.validate import validate
from little_envs import Doors

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


# -- prices and budgets ------------------------------------------------------------------------

DOORS = ("--env", f"{Path(__file__).parent / 'little_envs.py'}:Doors")


@pytest.fixture
def doors(tmp_path):
    """A run of two turns, of which the second calls the environment once."""
    save(tmp_path / "d.jsonl", trace_lines(rollout(Doors(), Softmax(), groups=1, rollouts=1)[0]))
    return tmp_path / "d.jsonl"


def test_a_price_is_quoted_from_the_record(doors, capfd):
    """By hand: from the first act on two turns and a call are left; an act kept costs no pass."""
    given = ("fork", doors, *DOORS, "-n", "5", "--json", "--price")
    for do, passes in (("resample", 10), ("keep", 5)):
        status, told, _ = cli(capfd, *given, "--at", "first:act", "--do", do)
        assert status == 0
        assert told == {"env_calls": 5, "forward_passes": passes, "tokens": told["tokens"]}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_budget_keeps_the_branches_that_it_pays_for(workers, doors, tmp_path, capfd):
    """Two passes each: seven pay for three, which are written, printed and said; exit 1. With the
    file that they stand in, the rest is played, and no branch stands there twice.
    """
    out = tmp_path / "b.jsonl"
    given = ("fork", doors, *DOORS, "-n", "5", "--at", "first:act", "--do", "resample", "--json")
    part = (*given, "--budget", "forward_passes=7", "-o", out, "--workers", workers)
    status, told, _ = cli(capfd, *part)
    assert (status, len(told["branches"])) == (1, 3)
    assert told["spent"]["forward_passes"] == 6
    assert told["notes"] == ["the budget is spent: 2 branches are left out"]
    status, whole, _ = cli(capfd, *given, "-o", out, "--append")
    assert (status, whole["cached"], whole["spent"]["forward_passes"]) == (0, 3, 4)
    assert whole["branches"] == cli(capfd, *given)[1]["branches"]
    assert [t.trace_id for t in read(out)] == [b["trace_id"] for b in whole["branches"]]


def test_nothing_is_led_along_where_the_budget_covers_no_branch(doors, capfd):
    """Then nothing is spent at all."""
    given = ("fork", doors, *DOORS, "-n", "5", "--at", "first:act", "--do", "resample", "--json")
    status, told, _ = cli(capfd, *given, "--budget", "env_calls=0", "--budget", "tokens=10")
    assert (status, told["branches"], told["mean"]) == (1, [], None)
    assert set(told["spent"].values()) == {0}
    status, _, err = cli(capfd, *given, "--budget", "dollars=1")
    assert status == 1
    assert "a budget is in env_calls, forward_passes, tokens, not dollars" in err


def test_a_torn_file_of_branches_is_named_with_its_line(file, tmp_path, capfd):
    """A branch that would be added to a file that cannot be read is not played."""
    path, _ = file
    out = tmp_path / "b.jsonl"
    given = ("fork", path, "--at", "first:act", "--do", "keep", "-n", "1", "-o", out, "--append")
    assert cli(capfd, *given)[0] == 0
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join([*lines[:-1], lines[-1][:20]]))
    status, _, err = cli(capfd, *given)
    assert status == 1
    assert f"{out}:{len(lines)}" in err
    assert "take the line out, and its branch is played again" in err


# -- replay of forks ---------------------------------------------------------------------------


def test_forks_are_played_again_from_their_parents(file, tmp_path, capfd):
    """Every kind of fork, and a fork of a fork, byte for byte; alone they are only folded. A parent
    that is another one than the fork left is named, and the others are still played.
    """
    path, trace = file
    given = ("fork", path, "--trace", trace.trace_id, "-o", path, "--append", "-n", "3", "--json")
    for at, do in (
        ("first:act", "resample"),
        ("first:act", "keep"),
        ("last:act", "remove"),
        ("first:spawn", "no_spawn"),
        ("first:delegate", "mute"),
        ("last:act", "stop_now"),
        ("first:observe", "keep"),
    ):
        _, told, _ = cli(capfd, *given, "--at", at, "--do", do)
    child = told["branches"][0]["trace_id"]
    cli(capfd, "fork", path, "--trace", child, "--at", "last:act", "--do", "resample", "-n", "1",
        "-o", path, "--append")  # fmt: skip
    status, told, _ = cli(capfd, "replay", path, "--json")
    assert (status, told["traces"], told["folded_only"]) == (0, told["identical"], 0)
    assert told["traces"] == 16 + 3 * 7 + 1
    alone, other = tmp_path / "alone.jsonl", tmp_path / "other.jsonl"
    forks = [t for t in read(path) if t.header.fork]
    save(alone, (line for t in forks for line in trace_lines(t)))
    status, told, _ = cli(capfd, "replay", alone, "--json")
    assert (status, told["identical"], told["folded_only"]) == (0, 0, len(forks))
    lines = path.read_bytes().replace(b'"text":"none"', b'"text":"nine"')
    other.write_bytes(lines)
    status, told, _ = cli(capfd, "replay", other, "--json")
    assert status == 1
    assert any("does not leave trace" in found["what"] for found in told["diverged"])
