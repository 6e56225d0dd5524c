"""The README's training program runs as it stands."""

import re
from pathlib import Path

import pytest

from tests.launching import mpirun

pytestmark = [pytest.mark.launches, pytest.mark.timeout(120)]

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("n", [0, 4])
def test_the_programs_of_the_readme(n):
    done = mpirun(n, "\n".join(BLOCKS) + "\nprint(f\"{total['w'][:2]} {total['b']}\\n\", end='')\n")
    assert done.rc == 0, done
    ranks = max(n, 1)
    said = re.findall(r"weights (\[.*?\]), last loss ([0-9.e-]+)", done.out)
    assert len(said) == ranks and len(set(said)) == 1, done.out
    assert said[0][0] == "[ 1. -2.  3.]" and float(said[0][1]) < 1e-9
    assert done.out.count(f"[{ranks}. {ranks}.] {ranks * (ranks - 1) / 2}") == ranks, done.out


def test_nothing_is_left_to_fill_in():
    assert not re.findall(r"@[A-Z_]+@", README)
