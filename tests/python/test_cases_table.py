"""The table of cases: every case has tests, and the committed table is theirs."""

from __future__ import annotations

import pytest

from tests import cases


@pytest.mark.parametrize("case", cases.CASES)
def test_a_case_has_a_test_that_runs_without_a_gpu(case: str) -> None:
    own = [test for test in cases.found() if test.case == case]
    assert any(not any("waits" in text for text in test.waits) for test in own)


def test_no_test_is_of_a_case_that_is_not_in_the_table() -> None:
    assert {test.case for test in cases.found()} == set(cases.CASES)
    assert len(cases.CASES) == 25


def test_the_committed_table_is_that_of_the_tests(capsys: pytest.CaptureFixture[str]) -> None:
    assert cases.main(["--check"]) == 0, capsys.readouterr().err


def test_a_table_that_lacks_a_test_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = cases.found()
    assert cases.table(tests) != cases.table(tests[1:])
    monkeypatch.setattr(cases, "found", lambda: tests[1:])
    assert cases.main(["--check"]) == 1
