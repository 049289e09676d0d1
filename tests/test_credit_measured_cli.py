"""`counterpoint credit` by methods that play on: prices, budgets, kept branches, and refusals."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from counterpoint.cli import main
from counterpoint.credit import METHODS, estimate
from counterpoint.envs import make
from counterpoint.harness import rollout
from counterpoint.policies.scripted import Scripted
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import Branching
from counterpoint.save import save, trace_lines
from counterpoint.steps import Steps
from little_envs import Doors

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
DOORS = ("--env", f"{HERE / 'little_envs.py'}:Doors")
OPTIONS = {"treemem": {"length_penalty": 0.1}, "ccpo": {"version": 1}}
PLAYING = [n for n, row in METHODS.items() if row.needs & {"replay", "decisions"}] + ["blame"]


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
    return status, json.loads(out) if out.startswith(("{", "[")) else out, err


def written(path, traces):
    save(path, (line for trace in traces for line in trace_lines(trace)))
    return path


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    """Four runs of the table's own environment, and their file."""
    traces = rollout(make("ledger-v0"), Softmax(), groups=2, rollouts=2, seed=19)
    return traces, written(tmp_path_factory.mktemp("ledger") / "r.jsonl", traces)


@pytest.fixture
def doors(tmp_path):
    """Two runs of a scout's turn and a leader's, of which the second calls the environment."""
    return written(tmp_path / "d.jsonl", rollout(Doors(), Softmax(), groups=2, rollouts=1))


def values(told):
    return [math_nan(unit["value"]) for unit in told["units"]]


def math_nan(value):
    return np.nan if value is None else value


# -- the same as in Python ---------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAYING)
def test_every_method_that_plays_on_says_what_it_says_in_python(name, ledger, capfd):
    """From a file alone: the environment and the policies are those that its header names."""
    traces, path = ledger
    given = [f"--set={key}={value}" for key, value in OPTIONS.get(name, {}).items()]
    status, told, err = cli(capfd, "credit", name, path, "--rerun", *given, "--json")
    credit = estimate(
        name, Steps.from_traces(traces), replay=Branching(traces), **OPTIONS.get(name, {})
    )
    assert (status, err) == (0, "")
    np.testing.assert_array_equal(values(told), credit.values)
    assert told["identified"] == credit.identified
    assert "replay" not in told["params"]


def test_a_decision_is_told_from_the_log_unless_branches_are_asked_for(ledger, capfd):
    """What a log cannot tell is refused, and branches are offered; with --rerun they are played."""
    _, path = ledger
    status, told, err = cli(capfd, "credit", "stop", path, "--json")
    assert (status, told["identified"], told["reason"]) == (1, "not", "no_overlap")
    assert "with --rerun, branches tell it" in err
    assert cli(capfd, "credit", "stop", path, "--rerun", "--json")[1]["identified"] == "randomised"


# -- prices and budgets ------------------------------------------------------------------------


def test_a_price_is_quoted_and_nothing_is_played(doors, tmp_path, capfd):
    """By hand: four siblings at each turn; two turns are left at the first, one at the second, so
    4·(2 + 1) for each of two runs. "message leader: 0" has three words, 'call open {"door": 0}'
    four, and words count where a policy gave no tokens: 4·(7 + 4) for each.
    """
    kept = tmp_path / "c.jsonl"
    asked = ("credit", "c3", doors, *DOORS, "--price", "--cache", kept, "--json")
    status, told, _ = cli(capfd, *asked)
    assert status == 0
    assert told == [{"method": "c3", "env_calls": 24, "forward_passes": 24, "tokens": 88}]
    assert not kept.exists()


def test_a_budget_that_ends_midway_gives_a_part_and_says_so(doors, capfd):
    """The first turn's siblings take 4·2 passes, the second's 4·1, and the next run's 8 are more
    than what is left of 19: two turns and the last are credited, the third is not, and exit is 1.
    """
    status, told, err = cli(
        capfd, "credit", "c3", doors, *DOORS, "--budget", "forward_passes=19", "--json"
    )
    whole = values(cli(capfd, "credit", "c3", doors, *DOORS, "--json")[1])
    assert status == 1
    assert "c3: the budget is spent: 8 branches are left out" in err
    assert told["left_out"] == 8
    assert told["diagnostics"]["forward_passes"] == 12
    part = values(told)
    assert part[:2] == whole[:2]
    assert np.isnan(part[2:]).all()


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (
            ("--budget", "dollars=3"),
            "a budget is in env_calls, forward_passes, tokens, not dollars",
        ),
        (("--budget", "tokens=-1"), "less than nothing"),
        (("--budget", "tokens=few"), "a whole number, not 'few'"),
        (("--no-rerun",), "c3 plays on from the runs and cannot do without; drop --no-rerun"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(extra, sentence, ledger, capfd):
    """Exit 1, one line."""
    status, out, err = cli(capfd, "credit", "c3", ledger[1], *extra)
    assert (status, out) == (1, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_an_option_that_would_have_no_effect_is_refused(ledger, tmp_path, capfd):
    """A method that plays nothing is bound by no budget; a batch has no runs."""
    status, _, err = cli(capfd, "credit", "grpo", ledger[1], "--budget", "tokens=3")
    assert status == 1
    assert "grpo plays nothing here, so --budget has no effect" in err
    status, _, err = cli(capfd, "credit", "c3", tmp_path / "b.npz", "--price")
    assert status == 1
    assert "a trainer's batch, of which --price says nothing" in err


def test_an_imported_log_is_refused_with_the_reason(capfd, tmp_path):
    """Nobody is there to play on with; another method of the same call still answers."""
    log = HERE / "data" / "tau_bench" / "gpt-4o-airline.json.gz"
    status, out, err = cli(capfd, "credit", "c3,rloo", log, "--format", "openai_chat")
    assert status == 1
    assert "rloo: " in out
    assert "refused: c3: c3 needs runs that can be played on from, and trace " in err
    assert "was not played by our harness: an imported log cannot be run again" in err


def test_policies_that_are_gone_are_named(tmp_path, capfd):
    """A run of a policy that no header can load needs --policy."""
    env = make("ledger-v0")
    team = {"coordinator": Softmax(), "researcher": Scripted(["none"])}
    path = written(tmp_path / "m.jsonl", rollout(env, team, groups=1, rollouts=1))
    status, _, err = cli(capfd, "credit", "c3", path)
    assert status == 1
    assert "nothing here can load it" in err
    assert cli(capfd, "credit", "c3", path, "--policy", "uniform", "--allow-changed")[0] == 0


# -- branches that are kept --------------------------------------------------------------------


@pytest.mark.parametrize("folder", [False, True])
def test_branches_that_are_kept_are_not_played_again(folder, ledger, tmp_path, capfd):
    """The second time nothing is spent and every number is the same; more of them cost the rest."""
    _, path = ledger
    kept = tmp_path / "kept"
    if folder:
        kept.mkdir()
    asked = ("credit", "c3,shapley", path, "--cache", kept, "--json")
    first, again = (cli(capfd, *asked)[1] for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert values(one) == pytest.approx(values(other), nan_ok=True)
        assert other["diagnostics"]["forward_passes"] == other["diagnostics"]["env_calls"] == 0
    more = cli(capfd, "credit", "c3", path, "--cache", kept, "--json", "--set=alternatives=5")[1]
    assert 0 < more["diagnostics"]["forward_passes"] < first[0]["diagnostics"]["forward_passes"]
    assert (
        more["units"]
        == (cli(capfd, "credit", "c3", path, "--json", "--set=alternatives=5")[1]["units"])
    )


def test_kept_branches_belong_to_seed_run_and_policy(tmp_path, capfd):
    """Another seed, another run or another policy is played, never read."""
    one, two = (
        written(tmp_path / f"{seed}.jsonl", rollout(make("ledger-v0"), Softmax(), groups=1,
                                                    rollouts=1, seed=seed))
        for seed in (1, 2)
    )  # fmt: skip
    played, kept = [], tmp_path / "c.jsonl"
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from counterpoint.policies.scripted import Scripted\npolicy = Scripted(['none'])\n"
    )
    other = ("--policy", f"{mine}:policy", "--allow-changed")
    for path, *extra in (
        (one,),
        (one, "--set=seed=1"),
        (two,),
        (one, *other),
        (one, *other),
        (one,),
    ):
        told = cli(capfd, "credit", "c3", path, "--cache", kept, "--json", *extra)[1]
        played.append(told["diagnostics"]["forward_passes"] > 0)
    assert played == [True, True, True, True, False, False]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: [*lines[:1], lines[1].replace(b'"exact":true', b'"exact":false'), *lines[2:]],
        lambda lines: [lines[0], lines[1][:40]],
        lambda lines: [lines[0], b"\xff\x00"],
        lambda lines: [lines[0], b'{"type":"credit"}'],
    ],
)
def test_a_spoilt_file_of_branches_is_named_with_its_line(spoil, ledger, tmp_path, capfd):
    """Changed, torn, binary, of another kind: a sentence, exit 1, and the file stays as it is."""
    _, path = ledger
    kept = tmp_path / "c.jsonl"
    cli(capfd, "credit", "c3", path, "--cache", kept)
    lines = kept.read_bytes().splitlines()
    spoilt = b"\n".join(spoil(lines)) + b"\n"
    kept.write_bytes(spoilt)
    status, out, err = cli(capfd, "credit", "c3", path, "--cache", kept)
    assert (status, out) == (1, "")
    assert f"{kept}:2 is no line of branches, or is torn or changed" in err
    assert kept.read_bytes() == spoilt
