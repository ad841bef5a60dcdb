"""Problems: each is on the page that service authors make theirs from."""

import re
from pathlib import Path

from txbox_http.problems import _KINDS

PAGE = Path(__file__).parents[3] / "docs" / "http.md"


def test_the_page_has_the_type_of_each_problem_with_its_status() -> None:
    rows = re.findall(r"\| (\d{3})\b[^|]*\| `#([a-z-]+)` \|", PAGE.read_text())
    assert sorted(rows) == sorted((str(status), kind) for kind, (status, _) in _KINDS.items())
