"""The table of pitfalls in tests/README.md names tests that exist, for every row."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NUMBERS = {  # part 2 of pitfalls.md: the numbers of each section
    "A": [1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 14, 15, 16], "B": [1, 2, 4, 6, 7], "C": [1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13],
    "D": [1, 2, 3, 4], "E": [1, 3, 4, 5, 6, 8, 9], "F": [1, 2, 3, 4, 6, 7, 8], "G": [1, 2, 3, 5, 6, 7, 8, 9, 10, 11],
    "H": list(range(1, 10)), "I": [1, 2, 3, 5, 6], "J": [2, 4], "K": [2, 3, 4, 5], "L": [1, 2],
}
ROWS = re.findall(r"^\| ([A-L]\d+) \| (.+?) \| (.+) \|$", (TESTS / "README.md").read_text(), re.MULTILINE)
REFERENCE = re.compile(r"`([\w/]+\.py)::(\w+)`")


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_row_is_there_once():
    assert [row for row, _, _ in ROWS] == [f"{section}{n}" for section, numbers in NUMBERS.items() for n in numbers]
    assert len(ROWS) == 79


@pytest.mark.parametrize("row, pitfall, where", ROWS, ids=[row for row, _, _ in ROWS])
def test_the_tests_of_a_row_exist(row, pitfall, where):
    named = REFERENCE.findall(where)
    assert named or where.startswith("not applicable: "), f"{row} names no test and no reason"
    for file, function in named:
        assert (TESTS / file).is_file() and function in functions(TESTS / file), f"{row}: there is no {file}::{function}"
    leftover = REFERENCE.sub("", where).strip(", ")
    assert not leftover or where.startswith("not applicable: "), f"{row}: {leftover!r} is no test"


def test_a_name_that_does_not_exist_is_found():
    with pytest.raises(AssertionError, match="there is no test_pitfalls.py::test_nothing"):
        test_the_tests_of_a_row_exist("Z1", "planted", "`test_pitfalls.py::test_nothing`")
    with pytest.raises(AssertionError, match="no test and no reason"):
        test_the_tests_of_a_row_exist("Z2", "planted", "later")


def test_most_rows_have_a_test():
    assert sum(not where.startswith("not applicable: ") for _, _, where in ROWS) >= 70
