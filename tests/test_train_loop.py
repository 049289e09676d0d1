"""The loop around updates: what it leaves in its folder, and how a killed run goes on."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from counterpoint import METHODS, Softmax, Steps, c3, estimate, make, read, rollout, train, update
from counterpoint.cli import app
from counterpoint.creditfile import read_entries
from counterpoint.policies import Output
from counterpoint.redrive import Branching
from counterpoint.spelling import Refused
from counterpoint.streams import Draws
from counterpoint.training import by_turn, cast_for, credited, frozen, read_curve
from little_envs import Doors

pytestmark = pytest.mark.slow

SMALL = {"groups": 3, "rollouts": 4, "lr": 0.7, "seed": 5}


def trained(folder=None, steps=4, method="rloo", env="ledger-v0", **more):
    """A small run, and the table that it moved."""
    team = Softmax()
    return train(make(env), team, method, steps=steps, out=folder, **{**SMALL, **more}), team


def files(folder):
    """Every file of a folder by name, as bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# ---------------------------------------------------------------------------------------------
# What it does


def test_the_loop_is_what_a_loop_of_ones_own_does():
    """Rollout, steps, estimate, update by hand: the same tables, number for number."""
    rows, team = trained()
    own, env = Softmax(), make("ledger-v0")
    for step in range(4):
        seed = Draws("5", "schedule", "train", step).integer(1 << 53)
        traces = rollout(env, own, groups=3, rollouts=4, seed=seed)
        steps = Steps.from_traces(traces)
        told = update(own, steps, estimate("rloo", steps), lr=0.7)
        assert rows[step]["gradient_norm"] == told["gradient_norm"]
        assert rows[step]["outcome"] == pytest.approx(np.mean([t.outcome for t in traces]))
    assert own.logits == team.logits


def test_a_folder_holds_traces_credit_policies_settings_and_the_curve(tmp_path):
    """What a step left can be read again, and the update recomputed from the two files alone."""
    rows, team = trained(tmp_path)
    assert read_curve(tmp_path) == rows
    assert len(files(tmp_path)) == 4 + 4 + 4 + 2
    before = Softmax.load(tmp_path / "policies/0003/0")
    steps = Steps.from_traces(read(tmp_path / "traces/0003.jsonl"))
    lines = read_entries(tmp_path / "credit/0003.jsonl")
    assert {line.policy_version for line in lines} == {before.version}
    assert lines[0].method == "rloo"
    values = [np.nan if line.value is None else line.value for line in lines]
    update(before, steps, type(estimate("rloo", steps))(np.array(values)), lr=0.7)
    assert before.logits == team.logits
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["env"] == {"id": "ledger-v0", "digest": make("ledger-v0").digest()}
    assert (settings["method"], settings["update"], settings["seed"]) == ("rloo", {"lr": 0.7}, 5)


def test_a_row_counts_what_was_spent_and_what_was_dead():
    """Calls of tools and acts of the traces; a group of equal outcomes gives nothing to learn."""
    env, team = make("ledger-v0"), Softmax()
    seed = Draws("5", "schedule", "train", 0).integer(1 << 53)
    traces = rollout(env, team, groups=3, rollouts=4, seed=seed)
    row = trained(steps=1)[0][0]
    assert row["env_calls"] == sum(len(t.of("tool_result")) for t in traces)
    assert row["forward_passes"] == sum(len(t.of("act")) for t in traces)
    groups = [{t.outcome for t in traces[g * 4 : g * 4 + 4]} for g in range(3)]
    assert row["dead_groups"] == sum(len(outcomes) == 1 for outcomes in groups)
    paid = [r.amount for t in traces for r in t.of("reward") if r.channel == "team"]
    assert row["success"] == pytest.approx(np.mean(paid))


def test_where_every_group_is_dead_nothing_moves_and_that_is_counted():
    """A team that always passes: no spread, no gradient, the version stays, the loop goes on."""
    team = Softmax({f"hire {n}: nobody": {"stop:unknown": 50.0} for n in range(3)})
    rows = train(make("ledger-v0"), team, "rloo", steps=2, **SMALL)
    assert [row["dead_groups"] for row in rows] == [3, 3]
    assert [row["gradient_norm"] for row in rows] == [0, 0]
    assert team.version.startswith("0-")


class Endless(Doors):
    """Nobody ever opens a door, so only a limit ends the run."""

    id = "endless-v0"

    def legal(self, agent):
        return {"wait": "none", "hum": "la la"}


def test_a_policy_that_never_acts_ends_by_its_limit_and_the_row_says_so():
    """Every run of an endless game is counted as truncated."""
    row = train(Endless(), Softmax(), "rloo", steps=1, groups=1, rollouts=2, lr=1.0)[0]
    assert (row["truncated"], row["runs"]) == (2, 2)


def test_a_policy_without_a_menu_is_refused_with_its_step():
    """The sentence names the step and the agent."""

    class Bare(Doors):
        def legal(self, agent):
            return None

    with pytest.raises(Refused, match="scout has none here"):
        train(Bare(), Softmax(), "rloo", steps=1, **SMALL)


# ---------------------------------------------------------------------------------------------
# Killed, and taken up again


class Killed(BaseException):
    """What a process that is killed does not survive."""


def killed_at(step):
    """A progress that ends the loop before a step."""

    def progress(steps):
        for number in steps:
            if number == step:
                raise Killed
            yield number

    return progress


@pytest.mark.parametrize("at", range(5))
def test_a_run_that_is_killed_before_a_step_goes_on_bit_for_bit(tmp_path, at):
    """Wherever it is killed: every file is the one of a run that was not, byte for byte."""
    whole, _ = trained(tmp_path / "whole", steps=5)
    with pytest.raises(Killed):
        trained(tmp_path / "broken", steps=5, progress=killed_at(at))
    rows, _ = trained(tmp_path / "broken", steps=5, resume=True)
    assert rows == whole
    assert files(tmp_path / "broken") == files(tmp_path / "whole")


LEFT = ("traces/0002.jsonl", "credit/0002.jsonl", "policies/0003/0")
"""What a step writes, in this order, before its line of the curve."""


@pytest.mark.parametrize("written", range(4))
def test_a_run_that_is_killed_within_a_step_goes_on_bit_for_bit(tmp_path, written):
    """With none, some or all of a step's files there, but not its line of the curve."""
    trained(tmp_path / "whole", steps=4)
    trained(tmp_path / "broken", steps=2)
    for name in LEFT[:written]:
        target = tmp_path / "broken" / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(b"half a step")
    trained(tmp_path / "broken", steps=4, resume=True)
    assert files(tmp_path / "broken") == files(tmp_path / "whole")


PROGRAM = """
import sys
from counterpoint import Softmax, make, train
train(make("ledger-v0"), Softmax(), "rloo", steps=40, groups=3, rollouts=4, lr=0.7, seed=5,
      out=sys.argv[1], resume=True)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_outright_goes_on_bit_for_bit(tmp_path):
    """SIGKILL at whatever it was doing, three times; in the end the run is the unbroken one."""
    trained(tmp_path / "whole", steps=40)
    broken, done = tmp_path / "broken", -1
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(broken)])
        while True:
            curve = broken / "curve.jsonl"
            lines = curve.read_bytes().count(b"\n") if curve.exists() else 0
            if lines > done + 3 or process.poll() is not None:
                break
        process.kill()
        process.wait()
        done = lines
    trained(broken, steps=40, resume=True)
    kept = {n: d for n, d in files(broken).items() if not n.endswith(".draft")}
    assert kept == files(tmp_path / "whole")


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_step(tmp_path):
    """No file may pass a kilobyte: a sentence, whole files, and the run goes on later."""
    trained(tmp_path / "run", steps=2)
    program = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, -1))\n"
        "from counterpoint.spelling import Refused\n"
        "try:\n    " + PROGRAM.strip().replace("\n", "\n    ") + "\n"
        "except Refused as refusal: sys.exit(str(refusal))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")], capture_output=True, text=True
    )
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(read_curve(tmp_path / "run")) == 2
    trained(tmp_path / "whole", steps=4)
    trained(tmp_path / "run", steps=4, resume=True)
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def test_a_longer_run_is_a_short_one_gone_on_with(tmp_path):
    """Two steps and then four are four."""
    trained(tmp_path / "whole", steps=4)
    trained(tmp_path / "parts", steps=2)
    trained(tmp_path / "parts", steps=4, resume=True)
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


OTHERS = {
    "seed": {"seed": 6},
    "method": {"method": "grpo"},
    "groups": {"groups": 4},
    "update": {"lr": 0.8},
    "env": {"env": "research-v0"},
    "budget": {"budget": {"env_calls": 100}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_goes_on_only_as_it_began(tmp_path, name):
    """Another environment, method, size, seed, rule or budget is refused by name."""
    trained(tmp_path, steps=1)
    before = files(tmp_path)
    with pytest.raises(Refused, match=f"settings.json has {name} "):
        trained(tmp_path, resume=True, **OTHERS[name])
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["layout", "counterpoint"])
def test_a_checkpoint_of_another_version_is_refused(tmp_path, name):
    """By name and both versions."""
    trained(tmp_path, steps=1)
    path = tmp_path / "settings.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, name: "0.0.7"}))
    with pytest.raises(Refused, match=f"has {name} '0.0.7', and this run has"):
        trained(tmp_path, resume=True)


def test_a_policy_that_is_not_the_one_of_the_curve_is_refused(tmp_path):
    """A checkpoint that was put there by somebody else has another version."""
    trained(tmp_path, steps=2)
    shutil.copy(tmp_path / "policies/0001/0", tmp_path / "policies/0002/0")
    with pytest.raises(Refused, match=r"holds version 1-.*the curve ends with version 2-"):
        trained(tmp_path, resume=True)


def test_a_folder_with_a_run_is_not_written_over(tmp_path):
    """Without resume it is refused; a curve that cannot be read is a sentence."""
    trained(tmp_path, steps=1)
    with pytest.raises(Refused, match="say --resume"):
        trained(tmp_path)
    (tmp_path / "curve.jsonl").write_text("{torn")
    with pytest.raises(Refused, match=r"curve.jsonl cannot be read"):
        trained(tmp_path, resume=True)


# ---------------------------------------------------------------------------------------------
# Who learns


def test_frozen_roles_act_as_before_and_are_not_credited():
    """With the coordinator alone learning, the researcher's table and version stay, and its turns
    are masked in what a method reads.
    """
    env, policy = make("ledger-v0"), Softmax()
    team = cast_for(env, policy, ["coordinator"])
    start = team["researcher"]
    train(env, team, "rloo", steps=3, **SMALL)
    assert team["coordinator"] is policy
    assert (policy.version[0], start.version[0]) == ("3", "0")
    steps = Steps.from_traces(rollout(env, team, groups=3, rollouts=8))
    learns = [steps.label("role", row) == "coordinator" for row in range(len(steps))]
    assert list(steps.mask) == learns
    assert False in learns


def test_roles_share_one_policy_or_have_one_each():
    """Shared, both roles are one table; apart, each moves by its own rows alone."""
    env = make("ledger-v0")
    shared = cast_for(env, Softmax())
    assert shared["coordinator"] is shared["researcher"]
    apart = cast_for(env, Softmax(), shared=False)
    assert apart["coordinator"] is not apart["researcher"]
    train(env, apart, "rloo", steps=2, **SMALL)
    anchors = {role: " ".join(policy.logits) for role, policy in apart.items()}
    assert "hire" in anchors["coordinator"]
    assert "job" not in anchors["coordinator"]
    assert "hire" not in anchors["researcher"]
    # one table with the same anchors learns the same: the two never share a state
    train(env, shared, "rloo", steps=2, **SMALL)
    both = {**apart["coordinator"].logits, **apart["researcher"].logits}
    assert dict(shared["coordinator"].logits) == both


def test_who_learns_has_to_exist_and_to_be_able_to():
    """A role that is none, a team of scripts, and a frozen policy that stays frozen."""
    env = make("ledger-v0")
    with pytest.raises(Refused, match="'judge' is none of them"):
        cast_for(env, Softmax(), ["judge"])
    with pytest.raises(Refused, match="none of coordinator has a policy that can learn"):
        cast_for(env, lambda observation, legal, draws: Output("none"), ["coordinator"])
    held = frozen(Softmax())
    assert frozen(held) is held


# ---------------------------------------------------------------------------------------------
# Measured methods


def test_a_measured_method_is_given_the_runs_to_run_again():
    """C3 in the loop is C3 on a Branching of the step's traces, and its branches are counted."""
    env, team = make("ledger-v0"), Softmax()
    traces = rollout(env, team, groups=2, rollouts=4, seed=3)
    steps = Steps.from_traces(traces)
    credit, account = credited("c3", steps, traces)
    direct = c3(steps, replay=Branching(traces, env, team))
    assert credit.values == pytest.approx(direct.values, abs=0)
    assert account.spent.forward_passes == direct.diagnostics["forward_passes"]


def test_a_run_keeps_to_its_budget():
    """Runs and branches together; the step that reaches it is the last, and overshoots by no more
    than its own runs.
    """
    free, _ = trained(method="c3", steps=6)
    budget = {"env_calls": int(1.5 * free[0]["env_calls"])}
    held, _ = trained(method="c3", steps=6, budget=budget)
    assert len(held) == 2
    assert held[0] == free[0]
    assert held[1]["branches_left_out"] > 0
    assert sum(row["env_calls"] for row in held) <= budget["env_calls"] + 12 * 2


def test_the_credit_of_a_decision_is_that_of_the_turn_that_took_or_declined_it():
    """A = (1 − p)τ where taken, −(1 − p)τ where declined, so that its mean over the policy is 0."""
    env, team = make("ledger-v0"), Softmax({"hire 0: nobody": {"spawn:0": 1.0}})
    traces = rollout(env, team, groups=2, rollouts=8, seed=3)
    steps = Steps.from_traces(traces)
    effect = estimate("spawn", steps, replay=Branching(traces))
    turn = by_turn(steps, effect)
    units = steps.units("decision")
    p = np.e / (np.e + 2)  # of spawning at the first anchor
    for unit in np.flatnonzero(effect.credited):
        row = units.row[unit]
        if steps.label("anchor", row) == "hire 0: nobody":
            taken = effect.parts["taken"][unit]
            expected = (1 - p) * effect.values[unit] if taken else -p * effect.values[unit]
            assert turn.values[row] == pytest.approx(expected, abs=1e-12)
    assert turn.unit == "turn"
    assert np.isnan(turn.values[~np.isin(np.arange(len(steps)), units.row)]).all()


def test_a_step_in_which_nobody_could_decide_is_dead_and_no_fault():
    """A team that always stops at once never aggregates: nothing is credited, nothing moves."""
    team = Softmax({"hire 0: nobody": {"stop:unknown": 60.0}})
    rows = train(make("ledger-v0"), team, "aggregate", steps=2, **SMALL)
    assert [(row["dead_groups"], row["rows"]) for row in rows] == [(3, 0), (3, 0)]
    assert team.version.startswith("0-")


# ---------------------------------------------------------------------------------------------
# Bad input, and the command

UNMET = {
    "gae": "the column value",
    "hiper": "segment_start",
    "treemem": "length_penalty",
    "ccpo": "outcomes of −1 and",
    "cosac": "policy=",
    "hcapo": "policy=",
}
"""Methods that ledger-v0 alone does not give what they need, and what the refusal speaks of."""


def run(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)], catch_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_command_trains_by_every_method_or_says_what_is_missing(name):
    """Two small steps in ledger-v0; a method whose needs are not met is refused in one sentence."""
    small = ("--steps", 2, "--groups", 2, "--rollouts", 2, "--json")
    done = run("ledger-v0", "--method", name, *small)
    if done.exit_code == 0:
        rows = json.loads(done.stdout)
        assert [row["step"] for row in rows] == [0, 1]
        return
    assert isinstance(done.exception, Refused)
    if name in UNMET:
        assert UNMET[name] in str(done.exception)
    assert METHODS[name].family == "generated" or name in UNMET, str(done.exception)


def test_the_command_writes_a_folder_and_goes_on_with_it(tmp_path):
    """-o, then --resume to more steps; the table has a line a step."""
    small = ("ledger-v0", "--method", "rloo", "--quick", "-o", tmp_path / "run")
    assert "rloo in ledger-v0" in run(*small, "--steps", 2).stdout
    done = run(*small, "--steps", 3, "--resume", "--json")
    assert [row["step"] for row in json.loads(done.stdout)] == [0, 1, 2]
    assert len(read_curve(tmp_path / "run")) == 3


def test_a_method_of_ones_own_trains(tmp_path):
    """file.py:function, with its digest in the settings; another text is another run."""
    own = tmp_path / "mine.py"
    own.write_text(
        "from counterpoint import Credit\n"
        "def mine(steps):\n    return Credit(steps.outcome, estimand='outcome')\n"
    )
    small = ("ledger-v0", "--method", f"{own}:mine", "--quick", "-o", tmp_path / "run")
    assert run(*small).exit_code == 0
    own.write_text(own.read_text() + "# changed\n")
    assert "has method_digest" in str(run(*small, "--resume").exception)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--method", "nonsense"), "there is no method"),
        (("--method", "rloo", "--update", "epoch=3"), "update has no option 'epoch'"),
        (("--method", "rloo", "--update", 'lr="x"'), "lr is 'x'"),
        (("--method", "rloo", "--learners", "judge"), "'judge' is none of them"),
        (("--method", "rloo", "--dial", "researchers=3"), "redundancy divides"),
        (("--method", "rloo", "--budget", "calls=3"), "a budget is in"),
    ],
)
def test_bad_arguments_are_sentences(arguments, sentence):
    """Each names what is wrong."""
    done = run("ledger-v0", *arguments, "--quick")
    assert isinstance(done.exception, Refused)
    assert sentence in str(done.exception)


def test_a_loss_that_is_no_number_stops_with_step_and_trace(tmp_path):
    """The step before stays whole, and is where the run goes on from."""
    own = tmp_path / "mine.py"
    own.write_text(
        "import numpy as np\nfrom counterpoint import Credit\n"
        "def mine(steps):\n"
        "    bad = np.where(np.arange(len(steps)) == 3, np.inf, steps.outcome)\n"
        "    late = steps.names['version'][0].startswith('2-')\n"
        "    return Credit(bad if late else steps.outcome, estimand='outcome')\n"
    )
    with pytest.raises(
        Refused, match=r"step 2: the loss is .* in epoch 0, from trace [0-9a-f]{32}"
    ):
        trained(tmp_path / "run", method=f"{own}:mine")
    assert len(read_curve(tmp_path / "run")) == 2


def test_report_reads_the_folder_of_a_run(tmp_path):
    """The page opens with the curve, and goes on with the runs of the last step."""
    trained(tmp_path / "run", steps=2)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "-o", str(tmp_path / "page")])
    assert done.exit_code == 0
    page = (tmp_path / "page/report.html").read_text()
    assert page.index("Training") < page.index("Credit")
    assert "<svg" in page
    assert "2 steps." in page
