"""The command line on odd input: a sentence and exit 1, and no option that does nothing."""

import subprocess
import sys

import pytest

from counterpoint import Recorder, Softmax, make, rollout
from counterpoint.cli import main
from counterpoint.formats import read
from counterpoint.save import save, trace_lines
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

pytestmark = pytest.mark.slow


def cli(capfd, *arguments):
    """(status, text, stderr) of a command, run as a person would."""
    old, sys.argv = sys.argv, ["counterpoint", *map(str, arguments)]
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code or 0
    finally:
        sys.argv = old
    return status, *capfd.readouterr()


@pytest.fixture
def runs(tmp_path):
    """Four runs of one task, two of which succeed."""
    path = tmp_path / "r.jsonl"
    with Recorder(path) as recorder:
        for number in range(4):
            with recorder.trace(task_id="capital") as run:
                run.act("worker", "Lima", anchor="asked")
                run.reward(float(number % 2))
    return path


def garbage(folder):
    path = folder / "g.jsonl"
    path.write_text("nonsense\nmore of it\n")
    return path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("replay", "{garbage}"), "holds no trace that can be read: V01 {garbage}:1"),
        (("export", "mas_rl_v1", "{garbage}", "-o", "{folder}/o"), "holds no trace that can be"),
        (("report", "{runs}", "-o", "{folder}", "--methods", "nope"), "there is no method 'nope'"),
        (("credit", "rloo", "{runs}", "--late", "{garbage}"), "V01 {garbage}:1: not JSON"),
        (("credit", "rloo", "{runs}", "--late", "{runs}"), "{runs} holds no late reward"),
        (("credit", "rloo", "{runs}", "-o", "{folder}/c.gz"), "c.gz would be compressed"),
        (("show", "{runs}", "--credit", "{garbage}"), "--credit adds to the rows of --summary"),
        (("credit", "communicate", "{runs}"), "communicate needs more than this log holds"),
        (("credit", "hiper", "{runs}"), "needs the columns segment_start, value, value_high"),
        (("credit", "gae", "{runs}"), "on the command line --set values=mc"),
        (("credit", "treemem", "{runs}"), "treemem needs"),
    ],
)
def test_odd_input_is_a_sentence(arguments, sentence, runs, tmp_path, capfd):
    """Exit 1, nothing on stdout, one line that says what is wrong and where."""
    named = {"garbage": garbage(tmp_path), "runs": runs, "folder": tmp_path}
    status, out, err = cli(capfd, *(str(a).format(**named) for a in arguments))
    assert (status, out) == (1, "")
    assert sentence.format(**named) in err
    assert err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g.jsonl", "r.jsonl"]


def test_how_is_one_of_two(runs, capfd):
    """Wrong usage, whatever the unit."""
    assert cli(capfd, "credit", "rloo", runs, "--how", "nope")[0] == 2


def test_the_largest_credit_is_named_by_trace_and_event(runs, capfd):
    """A row's number means nothing to who has a file: the first turn is event 1, after what it saw.

    By hand: outcomes 0, 1, 0, 1; the first misses the mean of the others, 2/3.
    """
    first = next(iter(read(runs)))
    _, out, _ = cli(capfd, "credit", "rloo", runs)
    assert f"{first.trace_id}:{first.of('act')[0].seq}, row 0: -0.666667" in out


@pytest.mark.parametrize("command", ["list methods --json", "list methods", "show {} --summary"])
def test_a_reader_that_has_gone_is_no_failure(command, runs):
    """Exit 0, and nothing to say, in tables as in JSON."""
    line = f"{sys.executable} -m counterpoint.cli {command.format(runs)} | true"
    done = subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_rewards_beyond_every_number_are_refused(tmp_path):
    """Two of 1e308 and more: the sentence names the trace, wherever they are summed."""
    with Recorder(tmp_path / "r.jsonl") as recorder, recorder.trace(task_id="rich") as run:
        run.act("worker", "x")
        run.reward(1.7e308)
        run.reward(1.7e308)
    (trace,) = read(tmp_path / "r.jsonl")
    for asked in (lambda: trace.outcome, lambda: Steps.from_traces([trace])):
        with pytest.raises(Refused, match=f"rewards of trace {trace.trace_id} sum to more"):
            asked()


@pytest.mark.parametrize("path", [None, 5, b"x"])
def test_a_recorder_needs_a_path(path):
    """A sentence, not a traceback of a library below."""
    with pytest.raises(Refused, match="a recorder writes to a file or folder, not to"):
        Recorder(path)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (lambda: make("research-v0", cost=-1.0), "cost is taken off, so it is not negative"),
        (
            lambda: rollout(make("ledger-v0"), Softmax(), groups=1, rollouts=1, config=5),
            "the config of a run is a mapping, not int",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(asked, sentence):
    """A cost that pays, a config that is a number."""
    with pytest.raises(Refused, match=sentence):
        asked()


def test_a_divergence_shows_that_it_was_cut_and_names_its_mode(tmp_path, capfd):
    """A changed act is found by acting again; a long text ends in … and not in the middle."""
    trace = rollout(make("ledger-v0"), Softmax(), groups=1, rollouts=1, seed=4)[0]
    path = tmp_path / "r.jsonl"
    save(path, trace_lines(trace))
    seen = trace.of("observe")[0]
    path.write_bytes(path.read_bytes().replace(b'"content":"', b'"content":"A' + b"h" * 80, 1))
    status, out, _ = cli(capfd, "replay", path)
    assert status == 1
    assert seen.seq == 0
    assert "mode 1 (seal)" in out
    assert "mode 2 (re-drive)" in out
    assert "…" in out
