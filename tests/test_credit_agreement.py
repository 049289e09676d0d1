"""Agreement of two credits: the figures by hand, and what is undefined."""

from __future__ import annotations

import math

import numpy as np
import pytest

from counterpoint.credit import score
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused

NAN = math.nan


def credit(*values, estimand="outcome", **fields) -> Credit:
    return Credit(np.array(values, dtype=float), estimand=estimand, **fields)


def test_figures_by_hand():
    """Truth 1, −1, 2, 0, 0; estimate 2, 1, 0, 0, 3.

    Non-zero truths: 3, of which 2 are decided (2 and 1), 1 with the right sign. Zero truths: 2, one
    false alarm. Pearson: means .4 and 1.2, deviations (.6, −1.4, 1.6, −.4, −.4) and
    (.8, −.2, −1.2, −1.2, 1.8): Σxy = .48 + .28 − 1.92 + .48 − .72 = −1.4, Σx² = 5.2, Σy² = 6.8.
    Spearman: ranks (4, 1, 5, 2.5, 2.5) and (4, 3, 1.5, 1.5, 5): Σ of products of deviations from 3
    = 1 + 0 − 3 + .75 − 1 = −2.25; squares 1 + 4 + 4 + .25 + .25 = 9.5 and
    1 + 0 + 2.25 + 2.25 + 4 = 9.5.
    """
    found = score(credit(2, 1, 0, 0, 3), credit(1, -1, 2, 0, 0, estimand="seqau"))
    assert found.n == 5
    assert (found.nonzero, found.zero, found.decided) == (3, 2, 2)
    assert found.sign_accuracy == 1 / 2
    assert found.coverage == pytest.approx(2 / 3)
    assert found.false_alarms == 1 / 2
    assert found.pearson == pytest.approx(-1.4 / math.sqrt(5.2 * 6.8))
    assert found.spearman == pytest.approx(-2.25 / 9.5)
    assert (found.estimand, found.truth) == ("outcome", "seqau")
    assert math.isnan(found.gradient_cosine)
    assert found.undefined == 0


def test_what_either_side_never_credited_is_left_out():
    """NaN is not 0: the pair leaves every figure."""
    found = score(credit(1, NAN, 3, 2), credit(1, 5, NAN, 2))
    assert found.n == 2
    assert found.pearson == pytest.approx(1)


@pytest.mark.parametrize("flat", [(1, 1, 1), (0.1 + 0.2, 0.3, 0.3), (0, 0, 0)])
def test_a_constant_side_has_no_correlation(flat):
    """NaN and counted, never 0, also where equal values differ by rounding."""
    for found in (score(credit(*flat), credit(1, 2, 3)), score(credit(1, 2, 3), credit(*flat))):
        assert math.isnan(found.pearson)
        assert found.undefined >= 1


def test_empty_denominators_are_undefined():
    """No zero truths: no false-alarm rate; nothing decided: no accuracy; no units: nothing."""
    found = score(credit(0, 0), credit(1, 2))
    assert found.coverage == 0
    assert math.isnan(found.sign_accuracy)
    assert math.isnan(found.false_alarms)
    assert (found.decided, found.zero) == (0, 0)
    nothing = score(credit(NAN), credit(1))
    assert nothing.n == 0
    assert all(math.isnan(x) for x in (nothing.pearson, nothing.spearman, nothing.coverage))
    assert nothing.undefined == 2


def test_gradient_cosine_uses_the_gradient_given():
    """Rows (1, 0), (1, 1): estimate 1, 0 gives (1, 0), truth 0, 1 gives (1, 1): cosine 1/√2."""
    scores = np.array([[1.0, 0.0], [1.0, 1.0]])
    found = score(credit(1, 0), credit(0, 1), gradient=lambda A: A @ scores)
    assert found.gradient_cosine == pytest.approx(1 / math.sqrt(2))
    none = score(credit(0, 0), credit(0, 1), gradient=lambda A: A @ scores)
    assert math.isnan(none.gradient_cosine)


def test_one_readable_line_names_both_estimands_and_samples():
    """The print has figures, their denominators, estimands, sample sizes, and no line break."""
    estimate = credit(1, -1, 0.5, diagnostics={"effective_sample_size": 3})
    line = str(score(estimate, credit(1, -1, 0, estimand="seqau")))
    assert line == (
        "outcome against seqau · 3 units · pearson 0.961 · spearman 1.000 · "
        "sign accuracy 1.000 (2 of 2 decided) · coverage 1.000 · false alarms 1.000 (of 1) · "
        "effective sample 3 against unsaid"
    )


def test_unlike_sides_are_refused():
    """Other rows or other units cannot be compared."""
    with pytest.raises(Refused, match="2 rows, the truth 1"):
        score(credit(1, 2), credit(1))
    with pytest.raises(Refused, match="per turn, the truth per agent"):
        score(credit(1), credit(1, unit="agent"))
